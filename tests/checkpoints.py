"""Small random checkpoints of every supported family, built and saved with transformers.

Initial weights are large, so that greedy decoding does not repeat one token. `save_tokenizer` adds
a byte-level tokenizer with a chat template, for tests that go from text to text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB: Final = 272  # 256 bytes, the special tokens, and some ids without a text
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS: Final = 258

_SHAPE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 256,
    "eos_token_id": EOS,
}
_EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
# name → (transformers' class without "Config", settings beside _SHAPE)
FAMILIES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, **_EXPERTS}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {"head_dim": 16, **_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
}


def build_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **settings: Any,
) -> Path:
    """Saves a random model of `family` with `settings` overriding its own; returns `folder`."""
    kind, own = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**_SHAPE, **own, **settings})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # transformers starts them at 0 and 1
            torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_model(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint in transformers, float32, plain attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """A tokenizer with an id for each byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
