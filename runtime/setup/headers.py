"""What a build of CPython needs beside a C compiler: make, and the headers of a few libraries.

Those that the machine lacks are fetched from its own package sources and unpacked into the cache
folder, without root. The libraries themselves are there: Debian's python3 depends on them.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from runtime.setup.apt import Apt
from runtime.setup.children import Failed, Workshop
from runtime.setup.console import say

_HEADERS = {
    "openssl/ssl.h": "libssl-dev",
    "zlib.h": "zlib1g-dev",
    "ffi.h": "libffi-dev",
    "lzma.h": "liblzma-dev",
    "bzlib.h": "libbz2-dev",
    "sqlite3.h": "libsqlite3-dev",
}


class Missing(Exception):
    """Packages that the build needs, that are not installed and could not be fetched."""

    def __init__(self, packages: list[str], reason: str) -> None:
        super().__init__(f"missing for the build: apt install {' '.join(packages)} ({reason})")


@dataclass(frozen=True, slots=True)
class Tools:
    """How to run configure and make."""

    make: str = "make"
    environ: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # for configure


def missing_packages() -> list[str]:
    """Debian packages that this machine would need in addition."""
    compiler = shutil.which("cc") or "gcc"
    packages = [package for header, package in _HEADERS.items() if not _compiles(compiler, header)]
    return packages + ["make"] * (shutil.which("make") is None)


def _compiles(compiler: str, header: str) -> bool:
    program = f"#include <stdio.h>\n#include <{header}>\n".encode()
    command = [compiler, "-E", "-x", "c", "-"]
    return subprocess.run(command, input=program, capture_output=True).returncode == 0


def prepare(shop: Workshop) -> Tools:
    """Makes sure of make and the headers. Raises Missing."""
    packages = missing_packages()
    if not packages:
        return Tools()
    say(f"this machine lacks {', '.join(packages)}: fetching them for the build alone")
    sysroot = shop.cache.folder("build", "sysroot")
    downloads = shop.cache.folder("build", "packages")
    try:
        apt = Apt(shop, shop.cache.folder("build", "apt-own"), sources=None)
        apt.update("Reading this machine's package lists (10 to 60 MB)")
        apt.run("Downloading headers (about 6 MB)", ["download", *packages], cwd=downloads)
        for archive in sorted(downloads.glob("*.deb")):
            command = ["dpkg-deb", "-x", str(archive), str(sysroot)]
            subprocess.run(command, check=True, capture_output=True)
        _relink(sysroot)
    except (Failed, OSError, subprocess.SubprocessError) as failure:
        raise Missing(packages, f"fetching them failed: {failure}") from failure
    return _tools(sysroot, packages)


def _tools(sysroot: Path, packages: list[str]) -> Tools:
    libraries = [path for path in (sysroot / "usr/lib").glob("*-linux-gnu*")]
    includes = [sysroot / "usr/include", *(sysroot / "usr/include").glob("*-linux-gnu*")]
    return Tools(
        make=str(sysroot / "usr/bin/make") if "make" in packages else "make",
        environ={
            "CPPFLAGS": " ".join(f"-I{path}" for path in includes if path.is_dir()),
            "LDFLAGS": " ".join(f"-L{path}" for path in libraries),
        },
        options=(f"--with-openssl={sysroot / 'usr'}",) if "libssl-dev" in packages else (),
    )


def _relink(sysroot: Path) -> None:
    """Points each libX.so, which came without its library, at the machine's own libX.so.N."""
    for link in (sysroot / "usr/lib").glob("*-linux-gnu*/lib*.so"):
        if link.exists() or not link.is_symlink():
            continue
        library = Path(os.readlink(link)).name
        triplet = link.parent.name
        for folder in (Path("/usr/lib") / triplet, Path("/lib") / triplet):
            if (folder / library).exists():
                link.unlink()
                link.symlink_to(folder / library)
                break
        else:
            raise FileNotFoundError(f"no {library} on this machine")
