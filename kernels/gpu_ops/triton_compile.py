"""Triton kernels to machine code, with a cache on disk. Knows nothing of launches.

Triton runs in processes of its own and only where the cache lacks something: it brings a compiler
of hundreds of megabytes, and is not made for threads without a GIL. `triton_launch.py` needs
nothing but the machine code. So a program's shapes, dtypes and constants are all settled here.
"""

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from gpu_ops.cuda_compile import CompileError, cache_folder, write_whole

SCRATCH_POINTERS: Final = 2  # last parameters of every kernel: scratch memory, null here
_FOLDER: Final = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel and all that decides its machine code. Pointers must be multiples of 16 bytes."""

    source: str  # a module of this package
    kernel: str
    types: tuple[str, ...]  # of its parameters but for the constants: "*bf16", "*i32", "i32"
    constants: tuple[tuple[str, int], ...]
    warps: int
    stages: int
    arch: int  # compute capability, times ten


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled program."""

    name: str
    threads: int
    shared_bytes: int
    code: bytes


def compiled(programs: Sequence[Program]) -> list[Cubin]:
    """Their machine code, from the cache or compiled now, on all cores (2 s, and 1 s for each).

    Raises CompileError.
    """
    paths = [_path(program) for program in programs]
    missing = {path: p for path, p in zip(paths, programs, strict=True) if not path.is_file()}
    if missing:
        _compile_elsewhere(list(missing.values()))
    return [_read(path) for path in paths]


def _path(program: Program) -> Path:
    digest = hashlib.sha256(repr((program, _triton_version())).encode())
    digest.update((_FOLDER / f"{program.source}.py").read_bytes())
    return cache_folder() / f"{program.kernel}-{digest.hexdigest()[:24]}.triton"


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _read(path: Path) -> Cubin:
    header, _, code = path.read_bytes().partition(b"\n")
    return Cubin(**json.loads(header), code=code)


def _compile_elsewhere(programs: list[Program]) -> None:
    """Shares the programs out to child processes; each writes to the cache."""
    children = min(len(programs), os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "TRITON_CACHE_DIR": scratch}
        environment.pop("TRITON_INTERPRET", None)
        environment["PYTHONPATH"] = os.pathsep.join([str(_FOLDER.parent), *sys.path[1:]])
        started = []
        for index in range(children):
            share = Path(scratch) / f"programs-{index}.json"
            share.write_text(json.dumps([asdict(program) for program in programs[index::children]]))
            command = [sys.executable, "-m", "gpu_ops.triton_compile", str(share)]
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, env=environment, text=True,
                )
            )  # fmt: skip
        outputs = [(child.communicate()[0], child.returncode) for child in started]
    for output, status in outputs:
        if status:
            raise CompileError(f"Triton refused a kernel: {output.strip()[-2000:]}")


def _compile(program: Program) -> None:
    """Writes it to the cache. Imports Triton, as nothing else may but the kernels themselves."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"gpu_ops.{program.source}"), program.kernel)
    constants, types = dict(program.constants), iter(program.types)
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else next(types) for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": program.warps, "num_stages": program.stages}
    made = triton.compile(source, target=GPUTarget("cuda", program.arch, 32), options=options)
    _check(program, made.metadata, made.asm["ptx"])
    header = {
        "name": made.metadata.name,
        "threads": 32 * made.metadata.num_warps,
        "shared_bytes": made.metadata.shared,
    }
    write_whole(_path(program), json.dumps(header).encode() + b"\n" + made.asm["cubin"])


def _check(program: Program, metadata: Any, ptx: str) -> None:
    """Raises CompileError where a launch would not be what Triton means: its form may change."""
    found = len(set(re.findall(rf"\b{metadata.name}_param_\d+", ptx)))
    if found != len(program.types) + SCRATCH_POINTERS:
        raise CompileError(f"{program.kernel} has {found} parameters after Triton's changes")
    if metadata.global_scratch_size:
        raise CompileError(f"{program.kernel} wants scratch memory, which no launch gives it")


def _read_program(fields: dict[str, object]) -> Program:
    types, constants = fields.pop("types"), fields.pop("constants")
    pairs = tuple((name, value) for name, value in constants)  # type: ignore[attr-defined]
    return Program(types=tuple(types), constants=pairs, **fields)  # type: ignore[arg-type]


if __name__ == "__main__":
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        _compile(_read_program(fields))
