"""Mixture of experts in place of the MLP. Knows nothing of how the experts are computed."""

import torch

from engine.model_config import Moe
from engine.models.layers import Destinations, Linear, Place
from gpu_ops import ops

Tensor = torch.Tensor


class MoeMlp:
    """A router, and its experts' fused weights. Owned by the engine thread once loaded.

    w13  [experts, 2 * ffn, hidden]: gate, then up
    w2   [experts, hidden, ffn]
    """

    def __init__(self, name: str, hidden: int, moe: Moe, place: Place) -> None:
        self._name, self._moe = name, moe
        self.router = Linear({f"{name}.gate": moe.experts}, hidden, False, place)
        self.w13 = place.empty(moe.experts, 2 * moe.ffn_size, hidden)
        self.w2 = place.empty(moe.experts, hidden, moe.ffn_size)

    def __call__(self, x: Tensor) -> Tensor:
        moe = self._moe
        return ops.moe(x, self.router(x), self.w13, self.w2, moe.top_k, moe.renormalise)

    def destinations(self) -> Destinations:
        yield from self.router.destinations()
        for expert in range(self._moe.experts):
            name = f"{self._name}.experts.{expert}"
            gate, up = self.w13[expert].chunk(2)
            yield f"{name}.gate_proj.weight", gate
            yield f"{name}.up_proj.weight", up
            yield f"{name}.down_proj.weight", self.w2[expert]

    def prepare_kernels(self) -> bool:
        """Compiles what the device needs, once for all layers; whether graphs may hold it."""
        return ops.prepare_moe(self.w13, self._moe.top_k, self._moe.renormalise)

    def pack(self) -> None:
        """The router alone: few tokens reach each expert, and its weights stay as they are."""
        self.router.pack()
