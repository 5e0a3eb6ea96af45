"""Checkpoints whole and broken: files, names, shapes, dtypes, dummies."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.load import load_model
from engine.models.decoder import Decoder
from engine.sharding import share_of
from engine.weights import INDEX_NAME, SINGLE_NAME, fill_with_dummies, load_weights
from tests.checkpoints import build_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path, "llama")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """What the model's tensors hold after loading, before they are packed."""
    config, _ = load_model(folder)
    model = Decoder(share_of(config), dtype=torch.float32, device="cpu", max_positions=8)
    load_weights(folder, model.destinations(), tied=config.tied)
    return {name: place.tensor for name, place in model.destinations().items()}


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; `__` in a name stands for a dot."""
    tensors = load_file(folder / SINGLE_NAME)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / SINGLE_NAME)


def test_every_tensor_arrives(folder: Path) -> None:
    loaded, saved = tensors_of(folder), load_file(folder / SINGLE_NAME)
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name


def test_sharded_checkpoint_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    sharded = build_checkpoint(tmp_path / "sharded", "llama", max_shard_size="60KB")
    assert (sharded / INDEX_NAME).exists() and not (sharded / SINGLE_NAME).exists()
    whole, parts = tensors_of(folder), tensors_of(sharded)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
def test_narrow_checkpoints_load_as_float32(tmp_path: Path, saved: torch.dtype) -> None:
    folder = build_checkpoint(tmp_path, "qwen2", dtype=saved)
    raw = load_file(folder / SINGLE_NAME)
    assert all(tensor.dtype == saved for tensor in raw.values())
    assert all(
        torch.equal(tensor, raw[name].float()) for name, tensor in tensors_of(folder).items()
    )


def test_progress_counts_bytes_up_to_the_whole(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(folder, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert {call[1] for call in calls} == {(folder / SINGLE_NAME).stat().st_size}
    assert done == sorted(done) and done[-1] == calls[0][1] and len(done) > 20


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model__norm__weight", None, "lacks model.norm.weight"),
        ("lm_head__weight", None, "lacks lm_head.weight"),
        ("model__extra", torch.ones(1), "model.extra is not a tensor of this model"),
        ("model__norm__weight", torch.ones(7), r"model.norm.weight is \[7\]; .* makes it \[48\]"),
        (
            "model__norm__weight",
            torch.ones(48, dtype=torch.int8),
            "model.norm.weight is I8; supported are F32, BF16, F16",
        ),
        (
            "model__norm__weight",
            torch.ones(48).to(torch.float8_e4m3fn),
            "model.norm.weight is F8_E4M3; supported",
        ),
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    rewrite(folder, **{name: tensor})
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_what_no_model_needs_is_passed_over(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "qwen3")
    head = load_file(folder / SINGLE_NAME)["model.embed_tokens.weight"].clone()
    inv_freq = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    rewrite(folder, lm_head__weight=head, **inv_freq)
    config, _ = load_model(folder)
    assert config.vocab_size == len(head)


def test_no_files(folder: Path) -> None:
    (folder / SINGLE_NAME).unlink()
    with pytest.raises(ModelError, match="has neither model.safetensors nor"):
        load_model(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -100])
def test_cut_off_file(folder: Path, kept: int) -> None:
    path = folder / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        load_model(folder)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 99])
def test_a_file_that_is_something_else(folder: Path, content: bytes) -> None:
    (folder / SINGLE_NAME).write_bytes(content)
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        load_model(folder)


def test_the_last_shard_is_looked_at_before_the_first_is_loaded(tmp_path: Path) -> None:
    sharded = build_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    last = sorted(sharded.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])

    def on_progress(done: int, total: int) -> None:
        raise AssertionError("something was loaded")

    with pytest.raises(ModelError, match=f"{last.name} cannot be read"):
        load_model(sharded, progress=on_progress)


def test_a_tensor_that_is_in_no_shard_though_the_index_names_it(tmp_path: Path) -> None:
    sharded = build_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    index = json.loads((sharded / INDEX_NAME).read_text())
    shard = sharded / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(ModelError, match="the checkpoint lacks model.norm.weight$"):
        load_model(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"weight_map": {}}', "non-empty"),
        ('{"weight_map": {"a": 1}}', "must name files"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "is no file in"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "is no file in"),
    ],
)
def test_broken_index(folder: Path, index: str, message: str) -> None:
    (folder / INDEX_NAME).write_text(index)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes((folder / SINGLE_NAME).read_bytes())
    weight_map = {"model.norm.weight": SINGLE_NAME, "lm_head.weight": "a.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="is in the checkpoint twice"):
        load_model(folder)


def test_dummies_need_no_files_and_repeat_by_seed(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "qwen3-moe")
    (folder / SINGLE_NAME).unlink()
    config, _ = load_model(folder, load_format="dummy")

    def dummies(seed: int) -> dict[str, torch.Tensor]:
        model = Decoder(share_of(config), dtype=torch.float32, device="cpu", max_positions=8)
        fill_with_dummies(model.destinations(), seed)
        return {name: place.tensor for name, place in model.destinations().items()}

    first, again, other = dummies(1), dummies(1), dummies(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(first["model.norm.weight"], torch.ones(48))
    assert 0.015 < first["model.layers.1.mlp.experts.2.up_proj.weight"].std() < 0.025
