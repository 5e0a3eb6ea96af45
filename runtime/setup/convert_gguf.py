"""Turns a Llama GGUF file into a checkpoint folder that transformers and the engine read.

Run as `python -m runtime.setup.convert_gguf FILE FOLDER` by the interpreter that has the packages;
the rest of `runtime.setup` needs the standard library alone. It does not know where either path
comes from. Written for SmolLM2: a GPT-2 style byte-level BPE whose digits are tokens of their own,
and tied embeddings.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL = int(gguf.TokenType.CONTROL)
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Writes weights (bf16), configuration and tokenizer of `source` into the existing `folder`.

    config.json comes last: its presence means that all the rest is there.
    Raises ValueError for an architecture, tokenizer or tensor that this converter does not know.
    """
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kinds = (meta["general.architecture"], meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])
    if kinds != ("llama", "gpt2", "smollm"):
        raise ValueError(f"{source}: expected a llama/gpt2/smollm GGUF file, found {kinds}")
    save_file(dict(_tensors(reader, meta)), folder / "model.safetensors", {"format": "pt"})
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    for name, value in (
        ("tokenizer_config.json", _tokenizer_config(meta)),
        ("generation_config.json", _generation_config(meta)),
        ("config.json", _config(meta)),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def _tensors(reader: gguf.GGUFReader, meta: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        name, part = _checkpoint_name(tensor.name)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if part in heads:
            values = _halves_apart(values, heads[part])
        yield name, values.to(torch.bfloat16).contiguous()


def _checkpoint_name(gguf_name: str) -> tuple[str, str]:
    """The name in a Hugging Face checkpoint, and which part of a layer (or "" outside layers)."""
    outside = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if gguf_name in outside:
        return outside[gguf_name], ""
    words = gguf_name.split(".")
    if len(words) != 4 or words[0] != "blk" or words[2] not in _LAYER_NAMES:
        raise ValueError(f"tensor {gguf_name!r} has no place in a tied Llama checkpoint")
    return f"model.layers.{words[1]}.{_LAYER_NAMES[words[2]]}.{words[3]}", words[2]


def _halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's row order of q and k, where the halves that RoPE pairs alternate."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        # GGUF keeps it as float32; six digits give back the number that was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_generation_config(meta),
    }


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
