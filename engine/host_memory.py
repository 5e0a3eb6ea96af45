"""How much of the machine's memory could still be taken: by the kernel, and by this control group.

A container or a systemd unit may be allowed less than the machine has free, and is killed beyond
it. Linux; imports no torch.
"""

import os
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_OWN_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Memory that could be taken: what is free, and what files are merely cached in."""
    free = memory_sizes(meminfo).get("MemAvailable")
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = group_room_bytes()
    return free if room is None else min(free, room)


def memory_sizes(meminfo: Path = _MEMINFO) -> dict[str, int]:
    """The kernel's figures in bytes, by its names for them; none where they cannot be read."""
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}
    except (OSError, ValueError):
        return {}


def group_room_bytes(own: Path = _OWN_GROUP, groups: Path = _GROUPS) -> int | None:
    """What this process's control group, and those around it, leave; None where none has a limit.

    own     lines of HIERARCHY:CONTROLLERS:PATH; version 2 has the hierarchy 0
    groups  where version 2 is mounted; inside of a container PATH may not exist there, and what
            limits the container is at the top
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    folder = groups / path
    folders = [folder, *folder.parents] if folder.is_dir() else [groups]
    within = [each for each in folders if each == groups or groups in each.parents]
    rooms = [room for each in within if (room := _room(each)) is not None]
    return min(rooms, default=None)


def _room(folder: Path) -> int | None:
    """None where the group has no limit, or cannot be read."""
    try:
        most = (folder / "memory.max").read_text().strip()
        if most == "max":
            return None
        used = int((folder / "memory.current").read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # given back before anything is killed
        return max(0, int(most) - used)
    except (OSError, ValueError):
        return None
