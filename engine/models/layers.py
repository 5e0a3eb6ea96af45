"""The parts that decoders are made of: parameters with the names that checkpoints give them.

A part allocates its fused tensors once and hands out, by checkpoint name, the places in them that
the loader fills: no weight is ever held twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpu_ops import cpu_linear, ops

Tensor = torch.Tensor
Destinations = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where new tensors are made."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Linear:
    """One product for several of a checkpoint's. Owned by the engine thread once loaded.

    weight  [sum of outputs, in], the parts one below the other
    """

    def __init__(self, parts: dict[str, int], inputs: int, bias: bool, place: Place) -> None:
        """`parts`: checkpoint name without its suffix → rows, in order."""
        rows = sum(parts.values())
        self._parts = parts
        self.weight = place.empty(rows, inputs)
        self.bias = place.empty(rows) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def destinations(self) -> Destinations:
        sizes = list(self._parts.values())
        for name, part in zip(self._parts, torch.split(self.weight, sizes), strict=True):
            yield f"{name}.weight", part
        if self.bias is not None:
            for name, part in zip(self._parts, torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", part

    def pack(self) -> None:
        """Lays the weight out for the CPU; the plain one is freed."""
        self.weight = cpu_linear.pack(self.weight)


class Mlp:
    """silu(gate x) * up x, then down. Owned by the engine thread once loaded."""

    def __init__(self, name: str, hidden: int, ffn: int, bias: bool, place: Place) -> None:
        self.gate_up = Linear(
            {f"{name}.gate_proj": ffn, f"{name}.up_proj": ffn}, hidden, bias, place
        )
        self.down = Linear({f"{name}.down_proj": hidden}, ffn, bias, place)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(ops.silu_mul(self.gate_up(x)))

    def destinations(self) -> Destinations:
        yield from self.gate_up.destinations()
        yield from self.down.destinations()

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()
