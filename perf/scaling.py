"""How fast a decode step can be on several GPUs: bytes and collectives against the floor.

A step multiplies with a rank's weights, which takes as long as reading them or, for many rows, as
the arithmetic; it reads its part of the keys and values; and it waits for one all-reduce after
attention and one after the MLP of every layer, one for the embedding and a gather of logits. The
rank with the largest part says how long: parts are those that serving deals out.

What an H200 does was measured, and what a sum of two takes (perf.bench_tp); what more than two take
is *assumed*; each constant says which it is.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from engine.footprint import (
    ITEM_BYTES,
    active_parameters,
    decode_kv_tokens,
    kv_token_bytes,
    read_parameters,
)
from engine.model_config import ModelConfig, parse_model_config
from engine.sharding import Share, share_of

MEMORY_BYTES_S: Final = 4.1e12  # measured: bytes of a decode step
FLOP_S: Final = 664e12  # measured: bf16 products, sustained
LINK_BYTES_S: Final = 280e9  # measured on two H200s: sums of 256 x 5,120, by stores to the peer
# Of a small sum in a graph, its norm included: measured on two H200s, assumed of more.
LATENCY_S: Final = {1: 0.0, 2: 3.9e-6, 4: 5e-6, 8: 7e-6}
ITEM: Final = ITEM_BYTES["bfloat16"]


def _qwen3(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **experts: Any
) -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
            "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": ffn,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": 128, "max_position_embeddings": 40960,
            "torch_dtype": "bfloat16", **experts,
        }
    )  # fmt: skip


MODELS: Final = {
    "Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408),
    "Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600),
    "Qwen3-30B-A3B": _qwen3(
        2048, 48, 32, 4, 6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The least time of one decode step on every rank, in seconds."""

    compute_s: float  # weights, keys and values
    latency_s: float  # of the collectives, however little they carry
    sums_s: float  # what the all-reduces carry
    gather_s: float  # what the gather of logits carries

    @property
    def collectives_s(self) -> float:
        return self.latency_s + self.sums_s + self.gather_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.collectives_s


def step_floor(config: ModelConfig, ranks: int, batch: int, context: int) -> StepFloor:
    """For `batch` rows of `context` tokens each. Collectives overlap with nothing here."""
    parts = [share_of(config, rank, ranks) for rank in range(ranks)]
    sums = 2 * config.layers + 1
    # A ring moves 2 (n - 1) / n of the data over each link, a gather (n - 1) / n of the result.
    share = (ranks - 1) / ranks
    return StepFloor(
        compute_s=max(_compute_s(part, batch, context) for part in parts),
        latency_s=(sums + 1) * LATENCY_S[ranks],
        sums_s=sums * 2 * share * batch * config.hidden_size * ITEM / LINK_BYTES_S,
        gather_s=share * batch * config.vocab_size * ITEM / LINK_BYTES_S,
    )


def _compute_s(part: Share, batch: int, context: int) -> float:
    own = replace(part.config, vocab_size=part.vocabulary_rows)
    weights = read_parameters(own, batch) * ITEM / MEMORY_BYTES_S
    products = 2 * active_parameters(own) * batch / FLOP_S
    kept = batch * decode_kv_tokens(own, context) * kv_token_bytes(own, ITEM) / MEMORY_BYTES_S
    return max(weights, products) + kept
