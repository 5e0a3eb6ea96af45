"""Some layers of experts with random weights, for benchmarks: what is timed, and what is right.

Experts come from random logits, so they are about as evenly used as a router can make them.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

import perf  # noqa: F401  (the path)
from gpu_ops import cuda_moe, ops, reference
from gpu_ops.cuda_moe import Model
from gpu_ops.moe_tiles import MoeShape, Tiles
from perf.gpu_timing import capture, replay_times_ms

Tensor = torch.Tensor

A3B: Final = MoeShape(2048, 768, 128, 8, 2)  # Qwen3-30B-A3B
LAYERS: Final = 4  # so many that no weight is still in L2 when its turn comes again
FLOOR_TB_S: Final = 4.1
FLOOR_TFLOPS: Final = 700.0
LIMIT: Final = 3 * 2.0**-9  # three roundings to bfloat16, of the norm


@dataclass(frozen=True, slots=True)
class Experts:
    """LAYERS layers' weights."""

    shape: MoeShape
    w13: list[Tensor]
    w2: list[Tensor]

    @classmethod
    def random(cls, shape: MoeShape) -> "Experts":
        def weights(*sizes: int) -> Tensor:
            empty = torch.empty(sizes, dtype=torch.bfloat16, device="cuda")
            return empty.normal_(0, sizes[-1] ** -0.5)

        size, ffn, experts = shape.size, shape.ffn, shape.experts
        w13 = [weights(experts, 2 * ffn, size) for _ in range(LAYERS)]
        return cls(shape, w13, [weights(experts, size, ffn) for _ in range(LAYERS)])

    @property
    def model(self) -> Model:
        return cuda_moe.model_of(self.w13[0], self.shape.top_k, True)


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one number of tokens."""

    experts: Experts
    x: Tensor
    logits: Tensor

    @classmethod
    def random(cls, experts: Experts, tokens: int) -> "Step":
        shape = experts.shape
        x = torch.randn(tokens, shape.size, device="cuda").to(torch.bfloat16)
        return cls(experts, x, torch.randn(tokens, shape.experts, device="cuda").to(x.dtype))

    def run(self) -> list[Tensor]:
        """Every layer, as a model runs it."""
        shape = self.experts.shape
        return [
            ops.moe(self.x, self.logits, w13, w2, shape.top_k, True)
            for w13, w2 in zip(self.experts.w13, self.experts.w2, strict=True)
        ]

    def run_with(self, tiles: Tiles) -> Tensor:
        """Every layer with these tiles; the last one's result."""
        out = torch.empty_like(self.x)
        for w13, w2 in zip(self.experts.w13, self.experts.w2, strict=True):
            cuda_moe.run(self.x, self.logits, w13, w2, out, self.experts.model, tiles)
        return out

    def layer_us(self, run: Callable[[], object], replays: int = 20) -> float:
        times = replay_times_ms(capture(run), replays)
        return statistics.median(times) * 1e3 / LAYERS

    def error(self, found: Tensor) -> float:
        """Of the last layer's result against the reference in float32, in parts of the norm."""
        w13, w2 = self.experts.w13[-1].float(), self.experts.w2[-1].float()
        shape = self.experts.shape
        expected = reference.moe(self.x.float(), self.logits.float(), w13, w2, shape.top_k, True)
        return float((found.float() - expected).norm() / expected.norm())

    def floor_us(self) -> tuple[float, int]:
        """And how many experts have a token."""
        shape = self.experts.shape
        chosen = self.logits.float().topk(shape.top_k).indices
        active = len(torch.unique(chosen))
        moved = active * 3 * shape.ffn * shape.size * 2 + 2 * self.x.nbytes + self.logits.nbytes
        flops = 6 * chosen.numel() * shape.ffn * shape.size
        return max(moved / FLOOR_TB_S / 1e6, flops / FLOOR_TFLOPS / 1e6), active
