"""Matrix products of a model with large weights, each with what follows it, in every way there is.

    python -m perf.bench_products [--model 14B] [--write]

Few rows: a product with its norm, activation or residual sum, streamed (csrc/streamed_linear.cu) in
several ways, beside cuBLAS alone. More rows: a product and the norm that follows it, whole and with
k cut into parts. Cold L2, medians; every way is checked before it is timed. --write puts the best
numbers of parts into gpu_ops/split_products.json, where they win by more than noise.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import click
import torch
import torch.nn.functional as F

import perf  # noqa: F401  (the path)
from gpu_ops import cuda_ops, cuda_split_linear, cuda_streamed_linear
from gpu_ops.after import After
from gpu_ops.cuda_launch import multiprocessors
from gpu_ops.cuda_streamed_linear import StreamTuning, stages_of, stream_tuning
from perf.bench_decode_graph import SHAPES, Shape, random_bf16
from perf.bench_kernels import figure
from perf.gpu_timing import ColdTimer, ceilings, device_facts
from perf.results import save

Tensor = torch.Tensor

EPS: Final = 1e-6
FEW: Final = (1, 8, 16)
MANY: Final = (32, 64, 96, 128, 160, 192, 224, 256)
PARTS: Final = (1, 2, 3, 4, 5, 6, 8)
_GAIN: Final = 0.01  # of the time: less is noise


class Product:
    """A weight and what is done around it. Owned by one thread."""

    def __init__(self, name: str, outputs: int, size: int, after: After) -> None:
        self.name, self.after = name, after
        self.weight = random_bf16(outputs, size)
        self.norm = torch.ones(size, dtype=torch.bfloat16, device="cuda")
        self.next_norm = torch.ones(outputs, dtype=torch.bfloat16, device="cuda")

    def operands(self, rows: int) -> tuple[Tensor, Tensor]:
        """x, and the residual that grows by the product."""
        outputs, size = self.weight.shape
        return random_bf16(rows, size) * size**0.5, random_bf16(rows, outputs)


def products(shape: Shape) -> list[Product]:
    heads = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    return [
        Product("qkv", heads, shape.hidden, After.STORE),
        Product("o", shape.hidden, shape.q_heads * shape.head_dim, After.ADD),
        Product("gate_up", 2 * shape.ffn, shape.hidden, After.SILU_MUL),
        Product("down", shape.hidden, shape.ffn, After.ADD),
    ]


def few_rows(timer: ColdTimer, product: Product, rows: int) -> Iterator[dict[str, Any]]:
    x, residual = product.operands(rows)
    weight, norm, after = product.weight, product.norm, product.after
    silu_mul = after == After.SILU_MUL
    normed = None if after == After.ADD else norm
    moved = weight.nbytes + x.nbytes + residual.nbytes
    name = f"{product.name} {rows}"

    def whole(into: Tensor) -> Tensor:
        y = x if normed is None else cuda_ops.rms_norm(x, norm, EPS)
        y = F.linear(y, weight)
        if after == After.ADD:
            return into.add_(y)
        return cuda_ops.silu_mul(y) if silu_mul else y

    expected = whole(residual.clone())
    yield figure(f"{name} cuBLAS alone", timer, lambda: F.linear(x, weight), moved)
    chosen = stream_tuning(rows, *weight.shape, multiprocessors(x.device), silu_mul)
    for tuning in stream_variants(chosen, rows, weight.shape[1]):
        out = residual.clone() if after == After.ADD else torch.empty_like(expected)
        launch = launcher(x, normed, weight, out, after, tuning)
        launch()
        check(out, expected, f"{name} {tuning}")
        yield figure(f"{name} {label(tuning)}", timer, launch, moved)


def launcher(
    x: Tensor, norm: Tensor | None, weight: Tensor, out: Tensor, after: After, tuning: StreamTuning
) -> Callable[[], None]:
    return lambda: cuda_streamed_linear.launch(x, norm, EPS, weight, out, after, tuning)


def stream_variants(chosen: StreamTuning, rows: int, size: int) -> Iterator[StreamTuning]:
    """The chosen way, with shorter rings, and with more or less of k to a stage."""
    yield chosen
    for stages in sorted({chosen.stages // 2, 3}):
        if stages < chosen.stages:
            yield replace(chosen, stages=stages)
    for boxes in (1, 2, 4):
        stages = stages_of(chosen.groups, boxes, rows)
        if boxes != chosen.boxes and size % (64 * boxes) == 0 and stages >= 2:
            yield replace(chosen, boxes=boxes, stages=stages)


def label(tuning: StreamTuning) -> str:
    return f"groups {tuning.groups} boxes {tuning.boxes} stages {tuning.stages}"


def many_rows(timer: ColdTimer, product: Product, rows: int) -> Iterator[dict[str, Any]]:
    x, residual = product.operands(rows)
    weight, norm = product.weight, product.next_norm
    moved = weight.nbytes + x.nbytes + 3 * residual.nbytes
    grown = residual.clone()  # what is timed adds to it again and again
    whole = cuda_split_linear.linear_add_rms_norm_(x, weight, residual.clone(), norm, EPS, 1)
    for parts in PARTS:
        wide_x, wide_weight = (filled_up(each, 64 * parts) for each in (x, weight))
        into = residual.clone()
        out = cuda_split_linear.linear_add_rms_norm_(wide_x, wide_weight, into, norm, EPS, parts)
        padded = wide_x.shape[1] - x.shape[1]
        name = f"{product.name} {rows} and norm, k in {parts}" + (f" + {padded}" if padded else "")
        check(out, whole, name)
        row = figure(
            name,
            timer,
            lambda x=wide_x, w=wide_weight, n=parts: (  # type: ignore[misc]
                cuda_split_linear.linear_add_rms_norm_(x, w, grown, norm, EPS, n)
            ),
            moved,
        )
        shape = "{}x{}".format(*weight.shape)
        yield {**row, "shape": shape, "rows": rows, "parts": parts, "padded": padded}


def filled_up(x: Tensor, multiple: int) -> Tensor:
    """With zeros, to a multiple of so many columns: a model would have to hold its weights so."""
    return F.pad(x, (0, -x.shape[1] % multiple)).contiguous()


def check(out: Tensor, expected: Tensor, what: str) -> None:
    """Both round to bf16 at most three times, 2^-9 of a value each."""
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    assert error < 2**-6, f"{what} is off by {error:.1e} of its norm"


def best_parts(rows: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
    """Shape: [rows up to which, parts], by the rows of `many_rows`."""
    table: dict[str, list[list[int]]] = {}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for most in dict.fromkeys(row["rows"] for row in rows if row["shape"] == shape):
            times = {
                row["parts"]: row["us"]
                for row in rows
                if row["shape"] == shape and row["rows"] == most and not row["padded"]
            }
            best = min(times, key=lambda parts: times[parts])
            pays = times[best] < (1 - _GAIN) * times[1]
            table.setdefault(shape, []).append([most, best if pays else 1])
    return table


def write_table(rows: list[dict[str, Any]]) -> None:
    table = json.loads(cuda_split_linear.TABLE.read_text())
    table.setdefault(torch.cuda.get_device_name(), {}).update(best_parts(rows))
    cuda_split_linear.TABLE.write_text(json.dumps(table, indent=1) + "\n")


@click.command()
@click.option("--model", type=click.Choice(list(SHAPES)), default="14B")
@click.option("--write", is_flag=True, help="Put the best numbers of parts into the table.")
def main(model: str, write: bool) -> None:
    torch.manual_seed(0)
    timer, measured = ColdTimer(), ceilings()
    print({name: round(value, 2) for name, value in measured.items()})
    few, many = list[dict[str, Any]](), list[dict[str, Any]]()
    for product in products(SHAPES[model]):
        for rows in FEW:
            few += few_rows(timer, product, rows)
        for rows in MANY if product.after == After.ADD else ():
            many += many_rows(timer, product, rows)
    print(best_parts(many))
    if write:
        write_table(many)
    figures = {"ceilings": measured, **device_facts(), "few_rows": few, "many_rows": many}
    print(save(f"bench_products_{model}", figures, figures["gpu"]))


if __name__ == "__main__":
    main()
