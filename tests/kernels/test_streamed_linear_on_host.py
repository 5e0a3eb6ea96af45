"""csrc/streamed_linear.cu run thread by thread on the host (on_host/), against float64.

What this shows is indices: who copies, multiplies, adds and writes what. The GPU tests do the rest.
Tolerance: as in test_gpu_linear.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_ops.after import After
from gpu_ops.cuda_compile import SOURCES
from gpu_ops.cuda_streamed_linear import StreamTuning, macros_of, stream_tuning

Tensor = torch.Tensor

HERE = Path(__file__).parent / "on_host"
LIMIT = 8e-3
EPS = 1e-6

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def host_text(source: str) -> str:
    """The kernel's text without what only a device's compiler knows."""
    lines = [line for line in source.splitlines() if not line.startswith("#include")]
    text = "\n".join(lines).replace("extern __shared__", "extern").replace("__shared__", "static")
    text = text.replace('asm volatile("bar.sync 1, 256;" ::: "memory");', "named_barrier(1, 256);")
    fence = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'
    assert "asm" not in text.replace(fence, "")
    return text.replace(fence, "")


def built(folder: Path, macros: dict[str, int]) -> Callable[..., int]:
    kernel, library = folder / "kernel.h", folder / "kernel.so"
    kernel.write_text(host_text((SOURCES / "streamed_linear.cu").read_text()))
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{HERE}", *defines]
    command += [f'-DKERNEL="{kernel}"', str(HERE / "streamed_linear.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    run: Callable[..., int] = ctypes.CDLL(str(library)).run
    return run


@pytest.mark.parametrize(
    ("tuning", "rows", "after", "normed", "outputs", "size"),
    [
        (StreamTuning(5, 4, 3), 1, After.ADD, False, 80, 1280),
        (StreamTuning(5, 4, 4), 13, After.ADD, False, 96, 1024),
        (StreamTuning(7, 2, 4), 8, After.STORE, True, 112, 640),
        (StreamTuning(7, 2, 8), 16, After.STORE, True, 64, 256),
        (StreamTuning(34, 1, 2), 2, After.SILU_MUL, True, 544, 320),
        (StreamTuning(6, 4, 2), 9, After.SILU_MUL, True, 128, 512),
        (StreamTuning(34, 1, 3), 3, After.STORE, True, 288, 192),
    ],
)
def test_a_product(
    tmp_path: Path, tuning: StreamTuning, rows: int, after: After, normed: bool, outputs: int,
    size: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    copies = 2 if after == After.SILU_MUL or tuning.groups > 32 else 1
    run = built(tmp_path, macros_of(tuning, 1 if rows <= 8 else 2, copies, normed, after))
    weight = (torch.randn(outputs, size) / size**0.5).bfloat16()
    x, norm = torch.randn(rows, size).bfloat16(), torch.rand(size).bfloat16()
    width = outputs // 2 if after == After.SILU_MUL else outputs
    out = torch.randn(rows, width).bfloat16()
    exact = expected(x, norm if normed else None, weight, out, after)
    owned = tuning.groups * 8 // (2 if after == After.SILU_MUL else 1)
    message = ctypes.create_string_buffer(200)
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (weight, x, norm, out)]
    status = run(
        *pointers, rows, outputs, size, -(-width // owned), ctypes.c_float(EPS), 1, message
    )
    assert status == 0, message.value.decode()
    error = float((out.double() - exact).norm() / exact.norm())
    print(f"{error:.2e} of the norm, limit {LIMIT}")
    assert error <= LIMIT


def expected(
    x: Tensor, norm: Tensor | None, weight: Tensor, residual: Tensor, after: After
) -> Tensor:
    y = x.double()
    if norm is not None:
        y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    product = y @ weight.double().T
    if after == After.SILU_MUL:
        gate, up = product.chunk(2, dim=-1)
        return gate * gate.sigmoid() * up
    return product + residual.double() if after == After.ADD else product


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
@pytest.mark.parametrize(
    ("outputs", "size", "silu_mul"),
    [
        (7168, 5120, False), (5120, 5120, False), (34816, 5120, True), (5120, 17408, False),
        (24576, 4096, True), (4096, 12288, False), (51200, 5120, True), (64, 64, False),
    ],
)  # fmt: skip
def test_how_a_product_is_cut_up(rows: int, outputs: int, size: int, silu_mul: bool) -> None:
    tuning = stream_tuning(rows, outputs, size, 132, silu_mul)
    columns = 1 if rows <= 8 else 2
    stage = tuning.boxes * ((tuning.groups + columns) * 1024 + 128)
    assert tuning.groups <= 64 and tuning.groups % (2 if silu_mul else 1) == 0
    assert size % (64 * tuning.boxes) == 0 and tuning.stages >= 3
    assert tuning.stages * stage + 1024 + 1024 <= 232_448
    assert -(-outputs // (8 * tuning.groups)) <= 132
