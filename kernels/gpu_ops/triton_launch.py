"""Launches what `triton_compile.py` made, as `cuda_launch.py` launches what NVRTC did.

The kernels keep the same three rules: with OVERLAP among their constants, they may start while the
kernel before them drains.
"""

import functools
from typing import Final

import torch

from gpu_ops.cuda_launch import Kernel, load_cubin
from gpu_ops.triton_compile import SCRATCH_POINTERS, Cubin, Program, compiled

Tensor = torch.Tensor

_LETTERS: Final = {"i32": "i", "i64": "q", "fp32": "f"}
_SCRATCH: Final = "P" * SCRATCH_POINTERS


@functools.cache
def _loaded(program: Program) -> tuple[Kernel, Cubin]:
    (cubin,) = compiled([program])
    letters = ["P" if kind.startswith("*") else _LETTERS[kind] for kind in program.types]
    run = Kernel(load_cubin(cubin.code, program.kernel), cubin.name, "".join(letters) + _SCRATCH)
    return run.allow_shared(cubin.shared_bytes), cubin


def launch(program: Program, blocks: int, *arguments: Tensor | int) -> None:
    """Launches on torch's current stream; does not synchronise; capturable.

    Slow the first time: `compiled` beforehand spares it the compiler.
    """
    run, cubin = _loaded(program)
    run.launch(
        (blocks, 1),
        cubin.threads,
        *(value.data_ptr() if isinstance(value, Tensor) else value for value in arguments),
        *(0,) * SCRATCH_POINTERS,
        shared_bytes=cubin.shared_bytes,
    )
