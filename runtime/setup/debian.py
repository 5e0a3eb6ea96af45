"""Builds a free-threaded CPython from Debian's source package, without root.

It needs apt-get and a C compiler; what else is missing (make, library headers) `headers` fetches
beside the build. Every stage leaves its result behind, so that a second attempt begins where the
first one stopped.
"""

import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from runtime.setup import headers
from runtime.setup.apt import Apt
from runtime.setup.children import Failed, Workshop

_RELEASE = "trixie"  # carries 3.13; its source builds on older releases too
_PACKAGE = "python3.13"
_DEFAULT_MIRROR = "http://deb.debian.org/debian"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class CannotBuild(Exception):
    """Why there will be no interpreter built here; one line."""


def executable(folder: Path) -> Path:
    """The interpreter inside a folder named like python-3.13.5t."""
    major, minor, _ = folder.name.removeprefix("python-").split(".")
    return folder / "bin" / f"python{major}.{minor}t"


def build(shop: Workshop) -> Path:
    """The folder of a newly built interpreter, which nobody has tried yet. Raises CannotBuild."""
    if shutil.which("apt-get") is None:
        raise CannotBuild("no apt-get to fetch Debian's Python source with")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise CannotBuild("no C compiler to build one with (apt install gcc)")
    try:
        return _build(shop)
    except headers.Missing as missing:
        raise CannotBuild(str(missing)) from missing
    except Failed as failure:
        raise CannotBuild(f"building one failed: {failure.explain()}") from failure


def _build(shop: Workshop) -> Path:
    workplace = shop.cache.folder("build")
    tarball = _source(shop, workplace)
    tree = workplace / f"Python-{_version(tarball)}"
    prefix = shop.cache.root / f"python-{_version(tarball)}t"
    tools = headers.prepare(shop)
    resumed = tree.is_dir()
    try:
        _compile(shop, tarball, tree, prefix, tools)
    except Failed:
        # A build that was killed can leave half a file that make takes for a whole one.
        if not resumed:
            raise
        shutil.rmtree(tree)
        _compile(shop, tarball, tree, prefix, tools)
    shutil.rmtree(workplace)
    return prefix


def _version(tarball: Path) -> str:
    """The 3.13.5 in python3.13_3.13.5.orig.tar.xz."""
    return tarball.name.removesuffix(".orig.tar.xz").split("_")[1]


# --- the source package


def _source(shop: Workshop, workplace: Path) -> Path:
    """The upstream tarball, downloaded and verified."""
    tarball = _verified(workplace)
    if tarball is None:
        mirror = archive_mirror(sources_files(Path("/etc/apt")))
        signed = f"[signed-by={_KEYRING}] " if _KEYRING.is_file() else ""
        line = f"deb-src {signed}{mirror} {_RELEASE} main\n"
        apt = Apt(shop, workplace / "apt", sources=line)
        apt.update(f"Reading the package list of Debian {_RELEASE} from {mirror} (10 MB)")
        apt.run(
            "Downloading Python's source (23 MB)",
            ["source", "--download-only", _PACKAGE],
            cwd=workplace,
        )
        tarball = _verified(workplace)
    if tarball is None:
        raise CannotBuild(f"apt-get left no sound source package of {_PACKAGE} in {workplace}")
    return tarball


def _verified(workplace: Path) -> Path | None:
    """A tarball that its .dsc vouches for. apt checked the .dsc against the signed package list."""
    for dsc in workplace.glob(f"{_PACKAGE}_*.dsc"):
        for name, digest in checksums(dsc.read_text(errors="replace")).items():
            path = workplace / name
            if name.endswith(".orig.tar.xz") and path.is_file():
                if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                    return path
    return None


def checksums(dsc: str) -> dict[str, str]:
    """File name to sha256, from a .dsc's Checksums-Sha256 field."""
    field = re.search(r"^Checksums-Sha256:[^\n]*\n((?:[ \t]+[^\n]*\n?)+)", dsc, re.MULTILINE)
    words = [line.split() for line in field[1].splitlines()] if field else []
    return {name: digest for digest, _, name in (line for line in words if len(line) == 3)}


def sources_files(folder: Path) -> list[Path]:
    """The files in which apt keeps its sources."""
    parts = sorted((folder / "sources.list.d").glob("*"))
    files = [
        folder / "sources.list",
        *(path for path in parts if path.suffix in (".list", ".sources")),
    ]
    return [path for path in files if path.is_file()]


def archive_mirror(files: Iterable[Path]) -> str:
    """The Debian mirror that this machine already uses, or the public one.

    Reads both formats: `deb URI suite component` lines and deb822 stanzas.
    """
    for file in files:
        text = re.sub(r"^[ \t]*#.*\n?", "", file.read_text(errors="replace"), flags=re.MULTILINE)
        if file.suffix == ".sources":
            stanzas = [
                s for s in re.split(r"\n\s*\n", text) if not re.search(r"(?mi)^Enabled:\s*no", s)
            ]
            uris = re.findall(r"(?mi)^URIs:((?:.*\n?)(?:[ \t]+\S.*\n?)*)", "\n".join(stanzas))
            candidates = [uri for value in uris for uri in value.split()]
        else:
            candidates = re.findall(r"^deb(?:-src)?\s+(?:\[[^\]]*\]\s*)?(\S+)", text, re.MULTILINE)
        for uri in candidates:
            if re.fullmatch(r"https?://\S+/debian/?", uri):
                return str(uri).rstrip("/")
    return _DEFAULT_MIRROR


# --- the build


def _compile(shop: Workshop, tarball: Path, tree: Path, prefix: Path, tools: headers.Tools) -> None:
    if not tree.is_dir():
        _unpack(tarball, tree)
    configured = tree / "plait-configured"
    if not configured.is_file():
        options = ["--disable-gil", "--with-ensurepip=no", f"--prefix={prefix}", *tools.options]
        shop.run(
            f"Configuring {tree.name} (about a minute)",
            ["./configure", *options],
            log="python-configure",
            cwd=tree,
            environ=tools.environ,
        )
        configured.touch()
    jobs = len(os.sched_getaffinity(0))
    shop.run(
        f"Compiling free-threaded {tree.name} on {jobs} cores (about {8 / jobs:.0f} minutes)",
        [tools.make, f"-j{jobs}"],
        log="python-make",
        cwd=tree,
        environ=tools.environ,
        describe=_file_compiled,
    )
    # Installed aside and renamed: a folder with the final name is a whole interpreter.
    stage = tree / "plait-stage"
    shutil.rmtree(stage, ignore_errors=True)
    shop.run(
        f"Installing it into {prefix}",
        [tools.make, "install", f"DESTDIR={stage}"],
        log="python-install",
        cwd=tree,
        environ=tools.environ,
    )
    shutil.rmtree(prefix, ignore_errors=True)
    Path(f"{stage}{prefix}").rename(prefix)


def _unpack(tarball: Path, tree: Path) -> None:
    aside = tree.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    with tarfile.open(tarball) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(aside)
    (top,) = aside.iterdir()
    top.rename(tree)
    aside.rmdir()


def _file_compiled(line: str) -> str | None:
    """The last source file of a compiler's command line."""
    sources = re.findall(r"(\S+\.c)\b", line)
    return sources[-1] if sources else None
