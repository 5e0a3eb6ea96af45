"""The models and workloads that are measured, without a checkpoint or a tokenizer."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perf.bench_decode_graph import SHAPES, Shape

MODELS: Final = {**SHAPES, "30B-A3B": Shape(2048, 48, 32, 4, 6144, False)}
_EXPERTS: Final[dict[str, dict[str, Any]]] = {
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
}


def write_config(folder: Path, model: str, context: int = 40_960) -> Path:
    """A folder with the config.json of Qwen3-`model`: enough for dummy weights."""
    shape = MODELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "eos_token_id": 151_645,
        **_EXPERTS.get(model, {}),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how many tokens each is to make; all submitted at once."""

    prompts: list[list[int]]
    new_tokens: list[int]
    temperature: float

    @property
    def output_tokens(self) -> int:
        return sum(self.new_tokens)


_REQUESTS: Final = 256


def offline_seed_0() -> Workload:
    """Mini-SGLang's and nano-vllm's: 142,827 tokens in, 133,966 out."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(_REQUESTS)
    ]
    lengths = [rng.randint(100, 1024) for _ in range(_REQUESTS)]
    return Workload(prompts, lengths, 0.6)
