"""A model's shape, read from config.json: one description for all supported families.

What tells the families apart (biases, norms of q and k, windows, experts) is data here, so that one
decoder serves them all. Knows nothing of files other than config.json, and nothing of devices.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from engine.errors import ModelError
from engine.rope import Rope, read_rope

# What the decoder's fused paths compute rightly: these fields whatever they say, those of _PLAIN
# where they say this. A field of neither turns fusing off for all, until somebody says how it is.
_FUSED_WITH: Final = frozenset({
    "architecture", "vocab_size", "hidden_size", "ffn_size", "layers", "heads", "kv_heads",
    "head_dim", "max_positions", "norm_eps", "rope", "tied", "qk_norm", "windows", "dtype",
})  # fmt: skip
_PLAIN: Final[Mapping[str, object]] = {
    "qkv_bias": False, "o_bias": False, "mlp_bias": False, "moe": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts in place of the dense MLP."""

    experts: int
    top_k: int
    ffn_size: int  # of one expert
    renormalise: bool  # the chosen experts' weights sum to 1
    layers: tuple[bool, ...]  # which layers have experts


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a decoder-only transformer. `read_model_config` validates them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None: all
    moe: Moe | None
    dtype: str  # of the checkpoint, by its own account: float32, float16 or bfloat16

    @property
    def fuses(self) -> bool:
        """Whether a layer's products may be fused with what is around them."""
        others = [field.name for field in fields(self) if field.name not in _FUSED_WITH]
        return all(name in _PLAIN and getattr(self, name) == _PLAIN[name] for name in others)


@dataclass(frozen=True, slots=True)
class _Family:
    qkv_bias: bool | None = None  # None: as `attention_bias` says, and then o_proj has one too
    mlp_bias: bool = False  # `mlp_bias` is a setting of the family
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json is silent; None: hidden size / heads
    windows: str = "none"  # none, always (every layer), by_layer or by_switch (all or nothing)
    moe: bool = False


_FAMILIES: Final[Mapping[str, _Family]] = {
    "LlamaForCausalLM": _Family(mlp_bias=True),
    "MistralForCausalLM": _Family(qkv_bias=False, windows="always"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, windows="by_layer"),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128, windows="by_layer"),
    "Qwen3MoeForCausalLM": _Family(qk_norm=True, windows="by_switch", moe=True),
}
_DTYPES: Final = ("float32", "float16", "bfloat16")
# What the largest models known have, many times over: beyond that a file is broken, and building
# what it describes would take for ever or all memory.
_MOST: Final[Mapping[str, int]] = {
    "vocab_size": 1 << 21,  # what the CUDA sampler takes, too
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 12,
    "num_experts": 1 << 16,
}


def read_model_config(folder: Path) -> ModelConfig:
    """The description in `folder`/config.json.

    Raises ModelError where the file is missing, broken, or describes what is not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: is {folder} a model folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object")
    try:
        return parse_model_config(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The description in a parsed config.json. Raises ModelError naming the field."""
    architecture, family = _family(raw)
    _refuse_unsupported(raw)
    layers = _count(raw, "num_hidden_layers")
    hidden, heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    kv_heads = _count(raw, "num_key_value_heads", heads)
    head_dim = _head_dim(raw, family, hidden, heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; it must be even")
    attention_bias = _switch(raw, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        ffn_size=_count(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_count(raw, "max_position_embeddings", 2048),
        norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope=read_rope(raw),
        tied=_switch(raw, "tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=family.mlp_bias and _switch(raw, "mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_windows(raw, family, layers),
        moe=_moe(raw, layers) if family.moe else None,
        dtype=_dtype(raw),
    )


def _head_dim(raw: Mapping[str, Any], family: _Family, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ModelError(
            f"hidden_size is {hidden}; it must be a multiple of num_attention_heads, {heads}, "
            "where there is no head_dim"
        )
    return _count(raw, "head_dim", family.head_dim or hidden // heads)


def _family(raw: Mapping[str, Any]) -> tuple[str, _Family]:
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in _FAMILIES:
            return name, _FAMILIES[name]
    supported = ", ".join(_FAMILIES)
    raise ModelError(f"architectures is {names!r}, which is not supported; supported: {supported}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {activation!r}; only silu is supported")
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise ModelError(f"the checkpoint is quantised ({method}), which is not supported")


def _count(raw: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{name} is missing")
    most = _MOST.get(name, 2**31 - 1)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ModelError(f"{name} is {value!r}; it must be an integer between {least} and {most}")
    return value


def _positive(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise ModelError(f"{name} is {value!r}; it must be a number in (0, 1)")
    return float(value)


def _switch(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{name} is {value!r}; it must be true or false")
    return bool(value)


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype is {name!r}; supported are {', '.join(_DTYPES)}")
    return name


def _windows(raw: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    """The rules of each family's configuration class in transformers."""
    everywhere: tuple[int | None, ...] = (None,) * layers
    if family.windows == "none":
        return everywhere
    if family.windows == "always":
        if raw.get("layer_types"):
            raise ModelError("layer_types is not supported for MistralForCausalLM")
        window = raw.get("sliding_window", 4096)
        return everywhere if window is None else (_count(raw, "sliding_window", 4096),) * layers
    if not _switch(raw, "use_sliding_window") or raw.get("sliding_window", 4096) is None:
        return everywhere
    window = _count(raw, "sliding_window", 4096)
    if family.windows == "by_switch":
        return (window,) * layers
    full_layers = _count(raw, "max_window_layers", 28, least=0)
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(None if layer < full_layers else window for layer in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    is_list = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if not is_list or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise ModelError(f"layer_types is {kinds!r}; it must be {layers} times one of {[*known]}")
    return tuple(known[kind] for kind in kinds)


def _moe(raw: Mapping[str, Any], layers: int) -> Moe:
    experts = _count(raw, "num_experts", raw.get("num_local_experts"))
    top_k = _count(raw, "num_experts_per_tok")
    if top_k > experts:
        raise ModelError(f"num_experts_per_tok is {top_k}, but there are {experts} experts")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"mlp_only_layers is {dense!r}; it must be a list of layers")
    step = _count(raw, "decoder_sparse_step", 1)
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    ffn_size = _count(raw, "moe_intermediate_size")
    return Moe(experts, top_k, ffn_size, _switch(raw, "norm_topk_prob"), sparse)
