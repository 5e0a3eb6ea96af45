"""How fast a decode step can be on several GPUs: bytes and collectives against the floor.

A step multiplies with a rank's weights, which takes as long as reading them or, for many rows, as
the arithmetic; it reads its part of the keys and values; and it waits for one all-reduce after
attention and one after the MLP of every layer, one for the embedding and a gather of logits.

What an H200 does was measured. What NVLink and NCCL take is *assumed* until `perf.bench_tp` has
measured it on several GPUs; each constant says which it is.
"""

from dataclasses import dataclass
from typing import Final

from engine.footprint import (
    ITEM_BYTES,
    active_parameters,
    kv_token_bytes,
    read_parameters,
)
from engine.model_config import ModelConfig, parse_model_config

MEMORY_BYTES_S: Final = 4.1e12  # measured: bytes of a decode step
FLOP_S: Final = 664e12  # measured: bf16 products, sustained
LINK_BYTES_S: Final = 360e9  # assumed: 0.8 of NVLink's 450 GB/s each way, as NCCL reaches on 8 GPUs
LATENCY_S: Final = {1: 0.0, 2: 7e-6, 4: 9e-6, 8: 12e-6}  # assumed: of a small all-reduce in a graph
ITEM: Final = ITEM_BYTES["bfloat16"]


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": hidden,
            "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": 128, "max_position_embeddings": 40960,
            "torch_dtype": "bfloat16",
        }
    )  # fmt: skip


MODELS: Final = {
    "Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408),
    "Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600),
}


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The least time of one decode step on every rank, in seconds."""

    compute_s: float  # weights, keys and values
    latency_s: float  # of the collectives, however little they carry
    transfer_s: float  # what they carry

    @property
    def step_s(self) -> float:
        return self.compute_s + self.latency_s + self.transfer_s


def step_floor(config: ModelConfig, ranks: int, batch: int, context: int) -> StepFloor:
    """For `batch` rows of `context` tokens each. Collectives overlap with nothing here."""
    weights = read_parameters(config, batch, ranks) * ITEM
    products = 2 * active_parameters(config) * batch / ranks
    kept = batch * context * kv_token_bytes(config, ITEM, ranks)
    sums = 2 * config.layers + 1
    # A ring moves 2 (n - 1) / n of the data over each link, a gather (n - 1) / n of the result.
    share = (ranks - 1) / ranks
    moved = sums * 2 * share * batch * config.hidden_size * ITEM
    moved += share * batch * config.vocab_size * ITEM
    return StepFloor(
        compute_s=max(weights / MEMORY_BYTES_S, products / FLOP_S) + kept / MEMORY_BYTES_S,
        latency_s=(sums + 1) * LATENCY_S[ranks],
        transfer_s=moved / LINK_BYTES_S,
    )
