"""The parts that decoders are made of: parameters with the names that checkpoints give them.

A part allocates its fused tensors once and hands out, by checkpoint name, the places in them that
the loader fills: no weight is ever held twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.destination import Destination, Destinations
from engine.sharding import Span
from gpu_ops import cpu_linear, ops

Tensor = torch.Tensor


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

    Of a group's ranks each has some rows of every part, or some columns of the only one; the
    products by columns are then to be added up.
    """

    def __init__(self, parts: Mapping[str, Span], inputs: Span, bias: bool, place: Place) -> None:
        """`parts`: checkpoint name without its suffix → rows, in order."""
        rows = sum(part.size for part in parts.values())
        self._parts, self._inputs = parts, inputs
        self.weight = place.empty(rows, inputs.size)
        self.bias = place.empty(rows) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def destinations(self) -> Destinations:
        sizes = [part.size for part in self._parts.values()]
        names = list(self._parts.items())
        for (name, rows), weight in zip(names, torch.split(self.weight, sizes), strict=True):
            yield f"{name}.weight", Destination.of(weight, rows, self._inputs)
        if self.bias is not None:
            for (name, rows), bias in zip(names, torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", Destination.of(bias, rows)

    def pack(self) -> None:
        """Lays the weight out for the CPU; the plain one is freed."""
        self.weight = cpu_linear.pack(self.weight)


class Mlp:
    """silu(gate x) * up x, then down. Owned by the engine thread once loaded.

    Of a group's ranks each gives a part of a sum.
    """

    def __init__(
        self, name: str, hidden: int, ffn: Span, bias: bool, place: Place, *, adds_bias: bool = True
    ) -> None:
        """adds_bias  whether this rank adds the bias of `down`, if there is one"""
        every = Span.all_of(hidden)
        self.gate_up = Linear(
            {f"{name}.gate_proj": ffn, f"{name}.up_proj": ffn}, every, bias, place
        )
        self.down = Linear({f"{name}.down_proj": every}, ffn, bias and adds_bias, place)

    def active(self, x: Tensor) -> Tensor:
        """What `down` multiplies."""
        return ops.silu_mul(self.gate_up(x))

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.active(x))

    def destinations(self) -> Destinations:
        yield from self.gate_up.destinations()
        yield from self.down.destinations()

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()
