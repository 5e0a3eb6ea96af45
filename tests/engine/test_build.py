"""Engines from settings: what is refused before any weight is loaded, and dummy weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.request import Request, SamplingParams

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def answer(folder: Path, **settings: Any) -> list[int]:
    """What an engine of one row says, greedily."""
    whole = {"max_running": 1, "page_size": 16, "max_kv_tokens": 64, "cpu_threads": 1, **settings}
    engine = build_engine(EngineConfig(folder, device="cpu", **whole))
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    engine.submit(Request(0, np.arange(9, dtype=np.int32), params, seed=0))
    ids: list[int] = []
    while engine.has_work:
        output = engine.step()
        assert output is not None
        ids += output.token_ids.tolist()
    engine.close()
    return ids


def write_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    return folder


def build(folder: Path, **settings: Any) -> None:
    """With a folder that has a config.json and nothing else: loading would fail at the weights."""
    build_engine(EngineConfig(write_config(folder), device="cpu", **settings))


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


def test_a_pool_that_no_memory_holds(tmp_path: Path) -> None:
    told = (
        r"0.0 GB of weights in float32 and 4398.0 GB of keys and values "
        r"\(max_kv_tokens is 2147483647\) are needed, but .* GB of memory are free on cpu"
    )
    with pytest.raises(ModelError, match=told):
        build(tmp_path, max_kv_tokens=2**31 - 1, dtype="float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 1 << 21, "hidden_size": 1 << 18, "num_attention_heads": 1 << 10},
        {"max_position_embeddings": 2**31 - 1},
    ],
    ids=str,
)
def test_a_model_that_no_memory_holds(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ModelError, match="GB of weights in .* are needed, but"):
        build_engine(EngineConfig(tmp_path, device="cpu", load_format="dummy", max_running=1))


def test_settings_that_fit_get_as_far_as_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has neither model.safetensors nor"):
        build(tmp_path, max_model_len=256, max_kv_tokens=256)


def test_dummy_weights_need_config_json_alone_and_are_the_same_each_time(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    first = answer(folder, load_format="dummy")
    assert len(first) == 12 and first == answer(folder, load_format="dummy", seed=0)
    assert first != answer(folder, load_format="dummy", seed=1)


def test_an_engine_is_built_without_torchs_compiler(checkpoint: Callable[[str], Path]) -> None:
    """Which would come along with a second of start-up and 150 MB."""
    program = (
        "import sys; from pathlib import Path; from engine.build import build_engine; "
        "from engine.config import EngineConfig; "
        "build_engine(EngineConfig(model=Path(sys.argv[1]), max_kv_tokens=512)); "
        "assert 'sympy' not in sys.modules and 'torch._dynamo' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join(map(str, (root, root / "http", root / "kernels")))
    command = [sys.executable, "-c", program, str(checkpoint("llama"))]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})
