"""A whole decode step as one CUDA graph: our kernels, torch's matrix products, random weights.

    python -m perf.bench_decode_graph [--model 0.6B] [--profile]

What the engine's step can at best take on the device, sampling included, without the engine: for
batch 256, 128 and 1 at 600 tokens of context. Times are of back-to-back replays; lengths grow by
one each. --profile adds the time by kernel, from torch's profiler over one replay.
"""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Final

import click
import torch
import torch.nn.functional as F

import perf  # noqa: F401  (the path)
from gpu_ops import cuda_linear, cuda_ops, cuda_split_linear, cuda_streamed_linear
from gpu_ops.after import After
from gpu_ops.cuda_decode import (
    DecodeAttention,
    HeadTransform,
    StepState,
    decode_inputs,
    decode_tuning,
)
from gpu_ops.cuda_launch import multiprocessors
from gpu_ops.cuda_sampling import Sampler
from gpu_ops.cuda_streamed_linear import stream_tuning
from gpu_ops.unnormed import Unnormed
from perf.bench_kernels import sampling_state
from perf.gpu_timing import capture, ceilings, device_facts, replay_times_ms
from perf.results import save

Tensor = torch.Tensor

PAGE_SIZE: Final = 64
EPS: Final = 1e-6
REPLAYS: Final = 30
PRODUCTS: Final = ("auto", "few", "many", "split", "cublas")


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's config decides its step's time."""

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    ffn: int
    tied: bool
    head_dim: int = 128
    vocabulary: int = 151936


SHAPES: Final = {
    "0.6B": Shape(1024, 28, 16, 8, 3072, True),
    "8B": Shape(4096, 36, 32, 8, 12288, False),
    "14B": Shape(5120, 40, 40, 8, 17408, False),
}


def random_bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[-1] ** -0.5)


class Layer:
    """Weights of one layer and its caches."""

    def __init__(self, shape: Shape, pages: int) -> None:
        heads = shape.q_heads + 2 * shape.kv_heads
        self.qkv = random_bf16(heads * shape.head_dim, shape.hidden)
        self.o = random_bf16(shape.hidden, shape.q_heads * shape.head_dim)
        self.gate_up = random_bf16(2 * shape.ffn, shape.hidden)
        self.down = random_bf16(shape.hidden, shape.ffn)
        self.norms = torch.ones((2, shape.hidden), dtype=torch.bfloat16, device="cuda")
        self.head_norms = torch.ones((2, shape.head_dim), dtype=torch.bfloat16, device="cuda")
        caches = (2, pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        self.k, self.v = torch.empty(caches, dtype=torch.bfloat16, device="cuda").normal_()

    def weights(self) -> tuple[Tensor, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Ways:
    """How a step does its products."""

    products: str  # few, many, split, cublas
    ring_stages: int = 0  # of streamed ones, at most; 0: as many as fit

    def __str__(self) -> str:
        ring = f", rings of {self.ring_stages}" if self.ring_stages else ""
        return self.products + ring


class Step:
    """One decode step over `batch` rows of a model. Owned by one thread."""

    def __init__(
        self, shape: Shape, layers: list[Layer], table: Tensor, lengths: list[int], ways: Ways
    ) -> None:
        self.ways, self.products = ways, ways.products
        device, batch = torch.device("cuda"), len(lengths)
        max_pages = -(-(max(lengths) + 200) // PAGE_SIZE)
        order = torch.randperm(batch * max_pages, device=device, dtype=torch.int32) + 1
        pages = torch.zeros((batch + 1, max_pages), dtype=torch.int32, device=device)
        pages[:-1] = order.view(batch, max_pages)
        self._begun = torch.tensor([*lengths, 0], dtype=torch.int32, device=device)
        self.state = StepState(
            self._begun.clone(), torch.ones(batch + 1, dtype=torch.int32, device=device), pages
        )
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.inputs = decode_inputs(batch, device)
        self.shape, self.layers, self.table = shape, layers, table
        self.attention = DecodeAttention(
            shape.q_heads, shape.kv_heads, shape.head_dim, PAGE_SIZE, batch, device,
            decode_tuning(batch, shape.q_heads, shape.kv_heads),
        )  # fmt: skip
        angles = torch.rand(4096, shape.head_dim // 2, device=device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.sampling = sampling_state(batch + 1, 0.6, 0, 1.0, 0.0)
        self.sampler = Sampler(batch, shape.vocabulary, device)
        self.ids = torch.empty(batch, dtype=torch.int32, device=device)
        self.bytes = self._floor_bytes(lengths)

    def _floor_bytes(self, lengths: list[int]) -> int:
        weights = sum(weight.nbytes for layer in self.layers for weight in layer.weights())
        shape = self.shape
        keys = sum(lengths) * 4 * shape.kv_heads * shape.head_dim * len(self.layers)
        return weights + keys + self.table.nbytes + 4 * len(lengths) * shape.vocabulary

    def rewind(self) -> None:
        self.state.lengths.copy_(self._begun)

    def run(self) -> None:
        inputs, layers = self.inputs, self.layers
        self.attention.prepare(self.rows, self.state, inputs)
        residual, x = cuda_ops.embed_rms_norm(inputs.ids, self.table, layers[0].norms[0], EPS)
        if self.products == "few":
            x = self._few_rows(residual)
        elif self.products == "many":
            x = self._many_rows(residual, x)
        else:
            x = self._any_rows(residual, x)
        logits = F.linear(x, self.table)
        self.sampler.sample_into(
            self.ids, logits, self.sampling, inputs.kv_lens, self.rows, self.state.last_token
        )

    def _any_rows(self, residual: Tensor, x: Tensor) -> Tensor:
        parts = None if self.products == "split" else 1
        add_and_norm_ = cuda_split_linear.linear_add_rms_norm_
        for layer, next_norm in self._with_next_norms():
            x = self._attend(layer, F.linear(x, layer.qkv))
            x = add_and_norm_(x, layer.o, residual, layer.norms[1], EPS, parts)
            x = cuda_ops.silu_mul(F.linear(x, layer.gate_up))
            x = add_and_norm_(x, layer.down, residual, next_norm, EPS, parts)
        return x

    def _many_rows(self, residual: Tensor, normed: Tensor) -> Tensor:
        x: Tensor | Unnormed = normed
        for layer, next_norm in self._with_next_norms():
            attended = self._attend(layer, cuda_linear.many_linear(x, layer.qkv))
            x = cuda_linear.many_linear_add_(attended, layer.o, residual, layer.norms[1], EPS)
            active = cuda_linear.many_linear_silu_mul(x, layer.gate_up)
            x = cuda_linear.many_linear_add_(active, layer.down, residual, next_norm, EPS)
        return cuda_ops.rms_norm(residual, self.layers[0].norms[0], EPS)

    def _with_next_norms(self) -> Iterator[tuple[Layer, Tensor]]:
        first = self.layers[0].norms[0]
        following = [*(layer.norms[0] for layer in self.layers[1:]), first]
        return zip(self.layers, following, strict=True)

    def _few_rows(self, residual: Tensor) -> Tensor:
        if self.ways.ring_stages:
            return self._streamed(residual)
        for layer in self.layers:
            qkv = cuda_linear.norm_linear(residual, layer.norms[0], EPS, layer.qkv)
            cuda_linear.linear_add_(self._attend(layer, qkv), layer.o, residual)
            x = cuda_linear.norm_linear_silu_mul(residual, layer.norms[1], EPS, layer.gate_up)
            cuda_linear.linear_add_(x, layer.down, residual)
        return cuda_ops.rms_norm(residual, self.layers[0].norms[0], EPS)

    def _streamed(self, residual: Tensor) -> Tensor:
        """`_few_rows` with rings of `ring_stages` stages, where they would be longer."""
        qkv, active = (
            residual.new_empty((len(residual), size))
            for size in (len(self.layers[0].qkv), len(self.layers[0].gate_up) // 2)
        )

        def launch(
            x: Tensor, norm: Tensor | None, weight: Tensor, out: Tensor, after: After
        ) -> None:
            silu_mul, resident = after == After.SILU_MUL, multiprocessors(x.device)
            tuning = stream_tuning(len(x), *weight.shape, resident, silu_mul)
            tuning = replace(tuning, stages=min(tuning.stages, self.ways.ring_stages))
            cuda_streamed_linear.launch(x, norm, EPS, weight, out, after, tuning)

        for layer in self.layers:
            launch(residual, layer.norms[0], layer.qkv, qkv, After.STORE)
            launch(self._attend(layer, qkv), None, layer.o, residual, After.ADD)
            launch(residual, layer.norms[1], layer.gate_up, active, After.SILU_MUL)
            launch(active, None, layer.down, residual, After.ADD)
        return cuda_ops.rms_norm(residual, self.layers[0].norms[0], EPS)

    def _attend(self, layer: Layer, qkv: Tensor) -> Tensor:
        head = HeadTransform(layer.head_norms[0], layer.head_norms[1], EPS, self.cos_sin)
        out = self.attention.attend_qkv(
            qkv, head, layer.k, layer.v, self.inputs.kv_lens, self.state.page_table,
            self.shape.head_dim**-0.5, rows=self.rows,
        )  # fmt: skip
        return out.flatten(1)


def best_products(rows: int, layer: Layer) -> str:
    """As the kernels themselves say what they should be used for."""
    if all(cuda_linear.takes(rows, weight) for weight in layer.weights()):
        return "few"
    many = all(cuda_linear.takes_many(rows, weight) for weight in layer.weights())
    return "many" if many else "split"


def by_kernel(step: Step, graph: torch.cuda.CUDAGraph) -> list[dict[str, Any]]:
    """Total time and count of each kernel in one replay, longest first."""
    from torch.profiler import ProfilerActivity, profile  # loads CUPTI: only where asked for

    step.rewind()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key[:90], "us": event.self_device_time_total, "count": event.count}
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row["us"])


def measure(step: Step, batch: int, profiled: bool) -> dict[str, Any]:
    graph = capture(step.run)
    step.rewind()
    times = replay_times_ms(graph, REPLAYS)
    assert 0 <= int(step.ids.min()) and int(step.ids.max()) < step.shape.vocabulary
    row: dict[str, Any] = {
        "batch": batch,
        "ms": round(statistics.median(times), 3),
        "ms_all": [round(t, 3) for t in times],
        "floor_ms_at_4.1": round(step.bytes / 4.1e9, 3),
    }
    print(
        f"batch {batch} {step.ways}: {row['ms']} ms, bytes at 4.1 TB/s {row['floor_ms_at_4.1']}",
        flush=True,
    )
    if profiled:
        row["by_kernel"] = by_kernel(step, graph)
        for entry in row["by_kernel"][:16]:
            print(f"   {entry['us']:9.1f} us  {entry['count']:4d}  {entry['kernel']}")
    return row


@click.command()
@click.option("--model", type=click.Choice(list(SHAPES)), default="0.6B")
@click.option("--context", default=600)
@click.option("--batch", "batches", multiple=True, default=(256, 128, 64, 32, 8, 1), type=int)
@click.option("--profile", "profiled", is_flag=True)
@click.option("--products", multiple=True, type=click.Choice(PRODUCTS), default=("auto",))
@click.option(
    "--ring-stages", multiple=True, default=(0,), help="Of streamed products, at most; 0: all."
)
def main(
    model: str,
    context: int,
    batches: tuple[int, ...],
    profiled: bool,
    products: tuple[str, ...],
    ring_stages: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    shape = SHAPES[model]
    measured = ceilings()
    print({name: round(value, 2) for name, value in measured.items()})
    pages = max(batches) * -(-(context + 200) // PAGE_SIZE) + 1
    layers = [Layer(shape, pages) for _ in range(shape.layers)]
    table = random_bf16(shape.vocabulary, shape.hidden)
    rows = []
    for batch, name, stages in product(batches, products, ring_stages):
        chosen = best_products(batch, layers[0]) if name == "auto" else name
        ways = Ways(chosen, stages)
        step = Step(shape, layers, table, [context] * batch, ways)
        rows.append({**asdict(ways), **measure(step, batch, profiled)})
    figures = {"ceilings": measured, **device_facts(), "context": context, "rows": rows}
    suffix = "" if products == ("auto",) else "_" + "_".join(products)
    print(save(f"bench_decode_graph_{model}{suffix}", figures, figures["gpu"]))


if __name__ == "__main__":
    main()
