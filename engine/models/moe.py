"""Mixture of experts in place of the MLP. Knows nothing of how the experts are computed."""

import torch

from engine.destination import Destination, Destinations
from engine.model_config import Moe
from engine.models.layers import Linear, Place
from engine.sharding import Span
from gpu_ops import ops

Tensor = torch.Tensor


class MoeMlp:
    """A router, and its experts' fused weights. Owned by the engine thread once loaded.

    w13  [experts, 2 * ffn, hidden]: gate, then up
    w2   [experts, hidden, ffn]

    Of a group's ranks each has a part of every expert, and gives a part of a sum.
    """

    def __init__(self, name: str, hidden: int, moe: Moe, ffn: Span, place: Place) -> None:
        self._name, self._moe, self._ffn = name, moe, ffn
        every = Span.all_of(hidden)
        self.router = Linear({f"{name}.gate": Span.all_of(moe.experts)}, every, False, place)
        self.w13 = place.empty(moe.experts, 2 * ffn.size, hidden)
        self.w2 = place.empty(moe.experts, hidden, ffn.size)

    def __call__(self, x: Tensor) -> Tensor:
        moe = self._moe
        return ops.moe(x, self.router(x), self.w13, self.w2, moe.top_k, moe.renormalise)

    def destinations(self) -> Destinations:
        yield from self.router.destinations()
        for expert in range(self._moe.experts):
            name = f"{self._name}.experts.{expert}"
            gate, up = self.w13[expert].chunk(2)
            yield f"{name}.gate_proj.weight", Destination.of(gate, self._ffn)
            yield f"{name}.up_proj.weight", Destination.of(up, self._ffn)
            yield (
                f"{name}.down_proj.weight",
                Destination.of(self.w2[expert], columns=self._ffn),
            )

    def prepare_kernels(self) -> bool:
        """Compiles what the device needs, once for all layers; whether graphs may hold it."""
        return ops.prepare_moe(self.w13, self._moe.top_k, self._moe.renormalise)

    def pack(self) -> None:
        """The router alone: few tokens reach each expert, and its weights stay as they are."""
        self.router.pack()
