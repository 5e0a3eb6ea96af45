"""What is refused before any weight is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ModelError

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def build(folder: Path, **settings: Any) -> None:
    """With a folder that has a config.json and nothing else: loading would fail at the weights."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    build_engine(EngineConfig(folder, device="cpu", **settings))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_model_len": 257}, "max_model_len is 257, but the checkpoint's context is 256"),
        ({"max_model_len": 256, "max_kv_tokens": 255}, "is 256, but the KV pool holds 192 tokens"),
        ({"max_kv_tokens": 63}, "max_kv_tokens is 63; it must be at least a page, 64 tokens"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_checkpoint(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        build(tmp_path, **settings)


def test_settings_that_fit_get_as_far_as_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has neither model.safetensors nor"):
        build(tmp_path, max_model_len=256, max_kv_tokens=256)
