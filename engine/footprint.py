"""Bytes and operations that follow from a model's shape, before anything is loaded.

Knows neither torch nor the machine. `kv_cache.py` and `build.py` size pools by the same formulas;
what a GPU's steps need beside them is measured there, and only guessed here (`workspace_bytes`).

Of a model that several ranks share, `config` is a rank's own (`engine/sharding.py`), and
`vocabulary_rows` says how many rows of the embedding and of the output layer it has; None: all.
"""

from collections.abc import Callable
from typing import Final

from engine.model_config import ModelConfig

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_FLOAT32: Final = 4
_INT32: Final = 4


def kv_token_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Bytes that are kept of one token, over all layers."""
    return 2 * config.layers * config.kv_heads * config.head_dim * item_bytes


def parameters(config: ModelConfig, vocabulary_rows: int | None = None) -> int:
    """Numbers that are held: all weights, none counted twice."""
    embedding = (vocabulary_rows or config.vocab_size) * config.hidden_size
    ends = embedding * (1 if config.tied else 2) + config.hidden_size
    return ends + sum(_layer(config, layer, _experts) for layer in range(config.layers))


def active_parameters(config: ModelConfig) -> int:
    """Numbers that one token is multiplied with: the output layer and its own experts, but not the
    embedding, of which it takes one row."""
    head = config.vocab_size * config.hidden_size + config.hidden_size
    return head + sum(_layer(config, layer, _top_k) for layer in range(config.layers))


def read_parameters(config: ModelConfig, batch: int, vocabulary_rows: int | None = None) -> float:
    """Numbers that are read for a decode step: experts that none of `batch` tokens goes to are
    left out, where tokens choose alike often."""
    head = (vocabulary_rows or config.vocab_size) * config.hidden_size + config.hidden_size

    def met(experts: int, top_k: int) -> float:
        return experts * (1 - (1 - top_k / experts) ** batch)

    return head + sum(_layer(config, layer, met) for layer in range(config.layers))


def rope_bytes(config: ModelConfig, positions: int) -> int:
    """The table of cosines and sines, which every rank has whole."""
    return positions * config.head_dim * _FLOAT32


def decode_kv_tokens(config: ModelConfig, context: int) -> float:
    """Tokens whose keys and values a decode row reads, mean of the layers: windows hide some."""
    seen = [context if window is None else min(window, context) for window in config.windows]
    return sum(seen) / len(seen)


def decode_flops(config: ModelConfig, batch: int, context: int) -> int:
    """Operations of a decode step, by all ranks; a multiplication and an addition are two."""
    products = 2 * active_parameters(config)
    attended = decode_kv_tokens(config, context) * config.layers
    attention = 4 * config.heads * config.head_dim * attended
    return int(batch * (products + attention))


def workspace_bytes(
    config: ModelConfig, item_bytes: int, *, prefill_tokens: int, rows: int, context: int
) -> int:
    """About what the largest prefill and the rows' state take on a GPU.

    prefill_tokens  most of one step
    context         of the longest request, tokens
    """
    hidden, heads = config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_dim
    ffn = config.ffn_size if config.moe is None else config.moe.ffn_size * config.moe.top_k
    widest = 4 * hidden + 2 * heads + 3 * ffn  # residual, norm, a layer's largest parts
    logits = min(rows, prefill_tokens) * config.vocab_size * item_bytes
    return prefill_tokens * widest * item_bytes + logits + rows * context // 16 * _INT32


def _layer(config: ModelConfig, index: int, counted: Callable[[int, int], float]) -> int:
    """Numbers of one layer.

    counted  of (experts, experts of a token), how many of a layer's experts are looked at
    """
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    fused = queries + 2 * keys
    attention = fused * hidden + queries * hidden + 2 * hidden
    biases = (fused if config.qkv_bias else 0) + (hidden if config.o_bias else 0)
    norms = 2 * dim if config.qk_norm else 0
    if config.moe is not None and config.moe.layers[index]:
        expert = 3 * hidden * config.moe.ffn_size
        experts = counted(config.moe.experts, config.moe.top_k)
        mlp = config.moe.experts * hidden + int(experts * expert)
    else:
        ffn = config.ffn_size
        mlp = 3 * hidden * ffn + (2 * ffn + hidden if config.mlp_bias else 0)
    return attention + biases + norms + mlp


def _experts(experts: int, _top_k: int) -> int:
    return experts


def _top_k(_experts: int, top_k: int) -> int:
    return top_k
