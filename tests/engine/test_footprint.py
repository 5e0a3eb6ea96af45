"""Sizes reckoned from a config, against the tensors of the model itself."""

from typing import Any

import pytest
import torch
import transformers

from engine.footprint import (
    ITEM_BYTES,
    active_parameters,
    decode_flops,
    decode_kv_tokens,
    kv_token_bytes,
    parameters,
    read_parameters,
    rope_bytes,
)
from engine.kv_cache import KvCache
from engine.load import outline
from engine.model_config import ModelConfig, parse_model_config
from engine.sharding import share_of
from tests.checkpoints import FAMILIES, VOCAB

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def shape_of(family: str, **changes: Any) -> ModelConfig:
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **settings, **changes})
    return parse_model_config({**config.to_dict(), "architectures": [f"{name}ForCausalLM"]})


def tensors_of(part: object) -> list[torch.Tensor]:
    """Every tensor of a model and of its parts, a tied one once."""
    found: dict[int, torch.Tensor] = {}

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, list):
            for each in value:
                walk(each)
        elif type(value).__module__.startswith("engine.models"):
            for each in vars(value).values():
                walk(each)

    walk(part)
    return list(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str) -> None:
    config = shape_of(family)
    model = outline(share_of(config), torch.bfloat16, positions=100)
    tensors = [place.tensor for place in model.destinations().values()]
    assert parameters(config) == sum(tensor.numel() for tensor in tensors)
    assert rope_bytes(config, 100) == model.cos_sin.nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_what_the_cache_has_for_it(family: str) -> None:
    config = shape_of(family)
    cache = KvCache.allocate(config, 3, 16, torch.bfloat16, "cpu")
    held = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert 3 * 16 * kv_token_bytes(config, ITEM_BYTES["bfloat16"]) == held


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "qwen3"])
def test_ranks_hold_what_their_share_says(family: str) -> None:
    config = shape_of(family)
    for rank in range(2):
        share = share_of(config, rank, 2)
        model = outline(share, torch.bfloat16, 1)
        held = sum(tensor.numel() for tensor in tensors_of(model)) - model.cos_sin.numel()
        assert parameters(share.config, share.vocabulary_rows) == held
    assert 2 * kv_token_bytes(share.config, 2) == kv_token_bytes(config, 2)


def test_a_known_model() -> None:
    config = parse_model_config(QWEN3_14B)
    assert parameters(config) == 14_768_307_200  # as its card says: 14.8B
    assert kv_token_bytes(config, 2) == 160 * 1024
    embedding = config.vocab_size * config.hidden_size
    assert active_parameters(config) == parameters(config) - embedding
    # 2 operations a parameter, and 4 a head's number a token of context.
    attention = 4 * 40 * 128 * 1000 * 40
    assert decode_flops(config, 3, 1000) == 3 * (2 * active_parameters(config) + attention)


def test_a_batch_reads_the_experts_that_it_meets() -> None:
    config = shape_of("qwen3-moe")
    assert read_parameters(config, 1) == pytest.approx(active_parameters(config), rel=1e-3)
    everything = parameters(config) - config.vocab_size * config.hidden_size
    assert read_parameters(config, 1) < read_parameters(config, 4) < everything
    assert read_parameters(config, 1000) == pytest.approx(everything, rel=1e-3)


def test_windows_hide_keys() -> None:
    config = shape_of("qwen2-window")  # one layer sees all, two see 9
    assert decode_kv_tokens(config, 300) == (300 + 9 + 9) / 3
    assert decode_kv_tokens(config, 5) == 5
