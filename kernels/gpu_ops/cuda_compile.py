"""CUDA C++ under csrc/ to machine code: NVRTC, with a cache on disk.

NVRTC comes with torch, so no toolkit is needed. A source includes nothing but files of csrc/, and
what varies (head_dim, tile sizes) is a macro: each set of macros is a program of its own.
Knows nothing of launches.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cuda.bindings import nvrtc

SOURCES: Final = Path(__file__).resolve().parent / "csrc"
_OPTIONS: Final = ("--std=c++17", "--use_fast_math", "--restrict", "--extra-device-vectorization")


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def cache_folder() -> Path:
    """Where compiled kernels are kept: $PLAIT_CACHE/kernels, else under the user's cache folder."""
    root = os.environ.get("PLAIT_CACHE")
    base = Path(root) if root else Path.home() / ".cache" / "plait"
    return base / "kernels"


def compiled(source: str, arch: str, macros: Mapping[str, int]) -> bytes:
    """The cubin of csrc/`source` for `arch` ("sm_90"), from the cache or compiled now (1-2 s).

    Raises CompileError.
    """
    options = [*_OPTIONS, f"--gpu-architecture={arch}"]
    options += [f"-D{name}={value}" for name, value in sorted(macros.items())]
    path = cache_folder() / f"{Path(source).stem}-{_key(source, options)}.cubin"
    if path.is_file():
        return path.read_bytes()
    cubin = _compile(source, options)
    write_whole(path, cubin)
    return cubin


def _key(source: str, options: list[str]) -> str:
    digest = hashlib.sha256(repr((nvrtc.nvrtcVersion()[1:], options)).encode())
    digest.update((SOURCES / source).read_bytes())
    for _, text in _headers():
        digest.update(text)
    return digest.hexdigest()[:24]


@functools.cache
def _headers() -> tuple[tuple[bytes, bytes], ...]:
    return tuple((path.name.encode(), path.read_bytes()) for path in sorted(SOURCES.glob("*.cuh")))


def _compile(source: str, options: list[str]) -> bytes:
    text = (SOURCES / source).read_bytes()
    names, texts = [name for name, _ in _headers()], [text for _, text in _headers()]
    program = _checked(
        nvrtc.nvrtcCreateProgram(text, source.encode(), len(names), list(texts), list(names))
    )
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{source} {options}\n{_log(program)}")
        cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(program: Any) -> str:
    log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode()


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"nvrtc: {status}")
    return values[0] if values else None


def write_whole(path: Path, content: bytes) -> None:
    """Several processes may compile at once: each writes a file of its own, then renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
