"""Tables of cosines and sines against transformers' own."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.rope import read_rope
from engine.rope_table import cos_sin_table

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 1_000_000.0},
        {"rope_type": "linear", "factor": 2.5},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        YARN,
        YARN | {"factor": 1.0},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
        YARN | {"mscale": 0.707},
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        YARN | {"beta_fast": 1, "beta_slow": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_table_equals_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    parameters = {"rope_theta": 10_000.0} | parameters
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters=dict(parameters),
    )
    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rope = read_rope({"max_position_embeddings": 256, "rope_parameters": parameters})
    table = cos_sin_table(rope, head_dim, 256)
    half = head_dim // 2
    # The same float32 operations in the same order: equal to the last bit.
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])
