"""Each CUDA kernel's time beside its floor: the bytes it must move at the copy rate.

    python -m perf.bench_kernels [--sweep]

Cold L2, medians. Attention reads one step's keys and values of one layer: equal lengths, and the
live batch of the offline workload (perf/workloads.py) after 70, 400 and 800 decode steps. --sweep
tries every way of sharing the work out. The JSON holds the measured copy and matrix rates beside
the times.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import click
import torch
import torch.nn.functional as F

import perf  # noqa: F401  (the path)
from gpu_ops import cuda_linear, cuda_ops
from gpu_ops.cuda_decode import DecodeAttention, DecodeTuning, decode_tuning
from gpu_ops.cuda_launch import multiprocessors
from gpu_ops.cuda_linear import ManyTuning
from gpu_ops.cuda_sampling import Sampler, SamplingState
from perf.gpu_timing import ColdTimer, ceilings, device_facts
from perf.results import save

Tensor = torch.Tensor

PAGE_SIZE: Final = 64
FLOOR_TB_S: Final = 4.1  # of a decode step, reachable
SWEEP: Final = (
    DecodeTuning(8),
    DecodeTuning(8, ring_bytes=160_000),
    DecodeTuning(4),
    DecodeTuning(4, 2),
    DecodeTuning(2),
    DecodeTuning(2, 2),
    DecodeTuning(1),
    DecodeTuning(1, ring_bytes=98_304),
    DecodeTuning(1, 2),
)


def workload_lengths(steps: int) -> list[int]:
    """Keys of each request still running after `steps` decode steps of the offline workload."""
    generator = random.Random(0)
    prompts = []
    for _ in range(256):
        count = generator.randint(100, 1024)
        for _ in range(count):
            generator.randint(0, 10000)
        prompts.append(count)
    outputs = [generator.randint(100, 1024) for _ in range(256)]
    return [p + steps for p, o in zip(prompts, outputs, strict=True) if o > steps]


def scenarios() -> dict[str, list[int]]:
    """Name: keys of each sequence."""
    equal = [(256, 600), (128, 600), (32, 600), (8, 600), (1, 600), (64, 1024), (1, 32768)]
    named = {f"{batch} x {keys}": [keys] * batch for batch, keys in equal}
    for steps in (70, 400, 800):
        lengths = workload_lengths(steps)
        named[f"live {len(lengths)} after {steps}"] = lengths
    return named


class Layer:
    """One layer's caches, the sequences' pages in random order unless said otherwise."""

    def __init__(
        self,
        lengths: list[int],
        q_heads: int,
        kv_heads: int,
        head_dim: int = 128,
        page_size: int = PAGE_SIZE,
        shuffled: bool = True,
    ) -> None:
        self.page_size = page_size
        counts = [-(-n // page_size) for n in lengths]
        pages = sum(counts) + 1
        order = (torch.randperm(pages - 1) if shuffled else torch.arange(pages - 1)) + 1
        table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        for row, part in enumerate(torch.split(order, counts)):
            table[row, : counts[row]] = part
        shape = (pages, page_size, kv_heads, head_dim)
        self.k, self.v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.page_table = table.cuda()
        self.kv_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.q = torch.randn((len(lengths), q_heads, head_dim), dtype=torch.bfloat16, device="cuda")
        self.bytes = 2 * sum(lengths) * kv_heads * head_dim * 2 + 2 * self.q.nbytes

    def attention(self, tuning: DecodeTuning) -> DecodeAttention:
        kv_heads, head_dim = self.k.shape[-2:]
        return DecodeAttention(
            self.q.shape[1], kv_heads, head_dim, self.page_size, len(self.kv_lens),
            self.q.device, tuning,
        )  # fmt: skip

    def run(self, attention: DecodeAttention) -> Callable[[], Tensor]:
        attention.plan(self.kv_lens)
        torch.cuda.synchronize()
        out = torch.empty_like(self.q)
        scale = self.q.shape[2] ** -0.5
        return lambda: attention.attend(
            self.q, self.k, self.v, self.kv_lens, self.page_table, scale, out=out
        )


def figure(name: str, timer: ColdTimer, run: Callable[[], object], moved: int) -> dict[str, Any]:
    """One row of the table: `moved` is the fewest bytes the kernel can move."""
    us = timer.median_us(run)
    row = {
        "kernel": name,
        "us": round(us, 2),
        "floor_us": round(moved / FLOOR_TB_S / 1e6, 2),
        "tb_s": round(moved / us / 1e6, 3),
    }
    print(
        f"{name:58s} {us:9.2f} us  floor {row['floor_us']:8.2f}  {row['tb_s']:.3f} TB/s", flush=True
    )
    return row


def attention_rows(timer: ColdTimer, sweep: bool) -> Iterator[dict[str, Any]]:
    """The 0.6B shape over all scenarios, then the larger models' on two."""
    for name, lengths in scenarios().items():
        layer = Layer(lengths, 16, 8)
        for tuning in SWEEP if sweep else (decode_tuning(len(lengths), 16, 8),):
            yield figure(
                f"attention 16/8 {name} {label(tuning)}", timer, layer.run(layer.attention(tuning)),
                layer.bytes,
            )  # fmt: skip
    for q_heads, kv_heads in ((32, 8), (40, 8), (64, 8), (32, 4)):
        for name in ("256 x 600", "live 153 after 400"):
            layer = Layer(scenarios()[name], q_heads, kv_heads)
            tuning = decode_tuning(len(layer.kv_lens), q_heads, kv_heads)
            yield figure(
                f"attention {q_heads}/{kv_heads} {name}", timer,
                layer.run(layer.attention(tuning)), layer.bytes,
            )  # fmt: skip


def label(tuning: DecodeTuning) -> str:
    """The tuning in a few letters: heads, blocks, least tiles, ring."""
    return (
        f"h{tuning.heads_per_block} b{tuning.blocks_per_multiprocessor} m{tuning.min_tiles}"
        f" {tuning.ring_bytes >> 10}k"
    )


def small_rows(timer: ColdTimer, n: int, size: int, ffn: int) -> Iterator[dict[str, Any]]:
    """What lies between a layer's matrix products, for n tokens of Qwen3's head shapes."""
    q_heads, kv_heads, head_dim, vocabulary = 16, 8, 128, 151936

    def random_bf16(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    x, residual, weight = random_bf16(n, size), random_bf16(n, size), random_bf16(size)
    yield figure(
        f"add_rms_norm_ {n} x {size}", timer,
        lambda: cuda_ops.add_rms_norm_(x, residual, weight, 1e-6), 4 * x.nbytes,
    )  # fmt: skip
    gate_up = random_bf16(n, 2 * ffn)
    yield figure(
        f"silu_mul {n} x {ffn}", timer, lambda: cuda_ops.silu_mul(gate_up), gate_up.nbytes * 3 // 2
    )
    qkv = random_bf16(n, (q_heads + 2 * kv_heads) * head_dim)
    k_cache, v_cache = (random_bf16(n, PAGE_SIZE, kv_heads, head_dim) for _ in range(2))
    cos_sin = torch.randn(4096, head_dim, device="cuda")
    positions = torch.full((n,), 600, dtype=torch.int32, device="cuda")
    slots = torch.arange(n, dtype=torch.int32, device="cuda") * PAGE_SIZE + 5
    norm = random_bf16(head_dim)
    yield figure(
        f"qk_norm_rope_store {n}", timer,
        lambda: cuda_ops.qk_norm_rope_store(
            qkv, norm, norm, 1e-6, cos_sin, positions, slots, k_cache, v_cache
        ),
        2 * qkv.nbytes,
    )  # fmt: skip
    table = random_bf16(vocabulary, size)
    ids = torch.randint(0, vocabulary, (n,), dtype=torch.int32, device="cuda")
    yield figure(
        f"embed_rms_norm {n} x {size}", timer,
        lambda: cuda_ops.embed_rms_norm(ids, table, weight, 1e-6), 3 * x.nbytes,
    )  # fmt: skip
    logits = 2.5 * random_bf16(n, vocabulary)
    logits[:, :64] += 12  # some likely ids, as a model's logits have
    for name, temperature, top_k, top_p, min_p in (
        ("greedy", 0.0, 0, 1.0, 0.0),
        ("temperature", 0.6, 0, 1.0, 0.0),
        ("top-p", 0.6, 0, 0.9, 0.0),
        ("top-k and top-p", 0.6, 20, 0.95, 0.0),
        ("min-p", 0.6, 0, 1.0, 0.1),
    ):
        state = sampling_state(n, temperature, top_k, top_p, min_p)
        sampler = Sampler(n, vocabulary, logits.device)
        yield figure(
            f"sample {n} {name}", timer,
            partial(sampler.sample_into, ids, logits, state, positions), logits.nbytes,
        )  # fmt: skip


def linear_rows(timer: ColdTimer, n: int, sweep: bool) -> Iterator[dict[str, Any]]:
    """Qwen3-0.6B's products: cuBLAS, ours, and with --sweep ours cut up in other ways."""
    shapes = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
    for name, (outputs, size) in shapes.items():
        x = torch.randn((n, size), device="cuda").to(torch.bfloat16)
        weight = torch.randn((outputs, size), device="cuda").to(torch.bfloat16)
        moved = x.nbytes + weight.nbytes + 2 * n * outputs
        yield figure(f"{name} {n} cuBLAS", timer, partial(F.linear, x, weight), moved)
        chosen = cuda_linear.many_tuning(n, outputs, size, multiprocessors(x.device))
        for tuning in variants(chosen) if sweep else (chosen,):
            yield figure(
                f"{name} {n} c{tuning.columns} splits {tuning.splits} stages {tuning.stages}",
                timer,
                partial(cuda_linear.many_linear, x, weight, tuning),
                moved,
            )


def variants(chosen: ManyTuning) -> Iterator[ManyTuning]:
    """The chosen way and its neighbours."""
    yield chosen
    for splits in (1, 2, 4, 8):
        for stages in (4, 8):
            other = replace(chosen, splits=splits, stages=stages)
            if other != chosen:
                yield other


def layout_rows(timer: ColdTimer) -> Iterator[dict[str, Any]]:
    """Whether the pages' size and order matter."""
    for page_size in (16, 64, 256):
        for shuffled in (True, False):
            layer = Layer([1024] * 256, 16, 8, page_size=page_size, shuffled=shuffled)
            tuning = decode_tuning(256, 16, 8)
            yield figure(
                f"attention 256 x 1024 page {page_size} {'shuffled' if shuffled else 'in order'}",
                timer, layer.run(layer.attention(tuning)), layer.bytes,
            )  # fmt: skip


def sampling_state(
    n: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> SamplingState:
    """The same parameters for n rows, seeds apart."""

    def fill(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((n,), value, dtype=dtype, device="cuda")

    seeds = torch.arange(n, dtype=torch.int32, device="cuda")
    return SamplingState(
        fill(temperature, torch.float32), fill(top_k, torch.int32), fill(top_p, torch.float32),
        fill(min_p, torch.float32), seeds, seeds,
    )  # fmt: skip


@click.command()
@click.option("--sweep", is_flag=True, help="Try many ways of cutting the work up.")
@click.option("--only", default="", help="Of attention, layout, small, linear: one.")
def main(sweep: bool, only: str) -> None:
    torch.manual_seed(0)
    timer = ColdTimer()
    measured = ceilings()
    print({name: round(value, 2) for name, value in measured.items()})
    rows = list(attention_rows(timer, sweep)) if only in ("", "attention") else []
    if only == "layout":
        rows += layout_rows(timer)
    for n in (256, 128, 1) if only in ("", "small") else ():
        rows += small_rows(timer, n, 1024, 3072)
    for n in (256, 128, 64) if only in ("", "linear") else ():
        rows += linear_rows(timer, n, sweep)
    figures = {"ceilings": measured, **device_facts(), "floor_tb_s": FLOOR_TB_S, "rows": rows}
    print(save("bench_kernels_sweep" if sweep else "bench_kernels", figures, figures["gpu"]))


if __name__ == "__main__":
    main()
