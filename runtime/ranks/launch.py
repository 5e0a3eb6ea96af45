"""`--tp N`: starts N ranks of this very command through torchrun, as a library, and waits for them.

What torchrun on the command line does not do, and this does:
- Nothing is left behind in the folder for temporary files: torchrun's own folder for logs would be.
  Where this process is killed, rank 0, which then ends, removes what this one no longer can.
- Nothing listens beyond loopback: torchrun's store would, on every address of the machine.
- SIGTERM drains, and then the exit code is 0: torchrun's own handler would make it 1 whatever the
  ranks did. Here a signal goes to the ranks, of which rank 0 obeys, and torchrun sees them end.
"""

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from runtime.ranks.rank import LOOPBACK

# torchrun's handlers would end the job; this one is left to it, for a quick end with all stacks.
_TORCHRUNS_SIGNAL: Final = "SIGQUIT"
# Every sign of life of this one node is a kilobyte more in the file: 17 MB a day at torchrun's 5 s.
_DAY_S: Final = 24 * 3600
_FOLDER: Final = "PLAIT_RANKS_FOLDER"  # the ranks' environment has what is to be removed


def run_ranks(size: int, environ: Mapping[str, str]) -> int:
    """Starts the ranks; the job's exit code: 0 where every rank's is, 1 otherwise.

    environ  theirs
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs  # as below
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # torch takes seconds

    os.environ.update(environ)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # it would listen on every address
    with tempfile.TemporaryDirectory(prefix="plait-ranks-") as folder:
        os.environ[_FOLDER] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file", "keep_alive_interval": _DAY_S},
            local_addr=LOOPBACK,
            max_restarts=0,
            signals_to_handle=_TORCHRUNS_SIGNAL,
            logs_specs=DefaultLogsSpecs(str(Path(folder) / "logs")),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _pass_on)
        try:
            elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
        except ChildFailedError:
            return 1  # the ranks said why
    return 0


@contextmanager
def removing_what_is_left() -> Iterator[None]:
    """Around all that rank 0 does: removes `run_ranks`' folder where that was killed meanwhile."""
    folder, parent = os.environ.get(_FOLDER), os.getppid()
    try:
        yield
    finally:
        if folder is not None and os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Gives the signal to every rank; each in a session of its own, so a terminal does not."""
    for pid in _children():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has just ended


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:
            pass  # the thread has just ended
    return found
