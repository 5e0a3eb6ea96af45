"""config.json in both spellings, and what is refused."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.model_config import ModelConfig, parse_model_config, read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_both_spellings_are_one_model() -> None:
    old = LLAMA | {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2},
        "torch_dtype": "bfloat16",
    }
    new = LLAMA | {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "dtype": "bfloat16",
    }
    assert parse_model_config(old) == parse_model_config(new)
    assert parse_model_config(old).rope.theta == 5e5


def test_silent_fields_take_their_family_s_defaults() -> None:
    config = parse_model_config(LLAMA)
    assert (config.head_dim, config.kv_heads, config.tied) == (16, 2, False)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)
    assert config.dtype == "float32"
    qwen3 = parse_model_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)
    qwen2 = parse_model_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)
    del (silent := dict(LLAMA))["num_key_value_heads"]
    assert parse_model_config(silent).kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 3,
            },
            (None, None, None, 7),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
        (MOE | {"use_sliding_window": True, "sliding_window": 7}, (7,) * 4),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_model_config(LLAMA | changes).windows == windows


def test_experts_by_layer() -> None:
    moe = parse_model_config(LLAMA | MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe
    assert moe is not None
    assert moe.layers == (False, True, False, False)
    assert (moe.experts, moe.top_k, moe.ffn_size, moe.renormalise) == (8, 2, 32, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*not supported; supported: Llama",
        ),
        ({"architectures": None}, "architectures is"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised .gptq."),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim is 15; it must be even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": [1]}, "they must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": -1}}, "factor is -1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": "x", "mscale_all_dim": 1}},
            "mscale is 'x'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, "yarn needs more"),
        (
            {"rope_scaling": {"type": "yarn"}, "max_position_embeddings": None},
            "original_max_position_embeddings is None",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "must exceed low_freq_factor",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; .* between 1 and 65536"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .* between 1 and 4096"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000; .* between 1 and 2097152"),
        ({"hidden_size": 65}, "hidden_size is 65; it must be a multiple of num_attention_heads, 4"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": [["full_attention"]] * 4,
            },
            "layer_types is .*4 times",
        ),
        (MOE | {"num_experts": 10**9}, "num_experts is 1000000000; .* between 1 and 65536"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (MOE | {"num_experts": None}, "num_experts is missing"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["x"]}, "layer_types"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked"] * 4,
            },
            "layer_types is .*4 times",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": "two",
            },
            "max_window_layers is 'two'",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model_config(LLAMA | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"vocab_size": 1' + "0" * 5000 + "}", "cannot be read"),
        ("[]", "JSON object"),
        ("{}", "config.json: "),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "fuses"),
    [
        ("LlamaForCausalLM", True),
        ("MistralForCausalLM", True),
        ("Qwen2ForCausalLM", False),
        ("Qwen3ForCausalLM", True),
        ("Qwen3MoeForCausalLM", False),
    ],
)
def test_families_without_biases_and_experts_fuse(architecture: str, fuses: bool) -> None:
    raw = LLAMA | MOE | {"architectures": [architecture], "sliding_window": 8}
    assert parse_model_config(raw).fuses is fuses


def test_no_switch_fuses_but_those_that_the_fused_paths_know() -> None:
    plain, known = parse_model_config(LLAMA), {"tied", "qk_norm"}
    moe = parse_model_config(LLAMA | MOE).moe
    switches = {field.name for field in fields(ModelConfig) if field.type is bool}
    assert switches >= known
    for name in switches - known:
        assert not replace(plain, **{name: True}).fuses, name
    for name in known:
        assert replace(plain, **{name: True}).fuses, name
    assert not replace(plain, moe=moe).fuses


@pytest.mark.parametrize("value", [False, True, None, 0, 1.0])
def test_a_field_that_nobody_has_thought_of_does_not_fuse(value: object) -> None:
    @dataclass(frozen=True, slots=True)
    class Next(ModelConfig):
        new: object

    plain = parse_model_config(LLAMA)
    shown = {field.name: getattr(plain, field.name) for field in fields(plain)}
    assert plain.fuses and not Next(**shown, new=value).fuses


_FIELDS = (
    *LLAMA, *MOE, "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "torch_dtype", "layer_types",
    "quantization_config", "use_sliding_window", "sliding_window", "max_window_layers",
    "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob",
)  # fmt: skip
_WORDS = ("Qwen2ForCausalLM", "MistralForCausalLM", "yarn", "llama3", "type", "factor", "bfloat16")
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(_WORDS)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_WORDS), inner),
    max_leaves=5,
)


@given(changes=st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=4), moe=st.booleans())
def test_whatever_config_json_says_is_a_model_or_refused(
    changes: dict[str, Any], moe: bool
) -> None:
    try:
        config = parse_model_config(LLAMA | (MOE if moe else {}) | changes)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert config.layers == len(config.windows) <= 4096
