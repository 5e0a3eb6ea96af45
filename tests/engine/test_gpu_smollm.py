"""SmolLM2 on a GPU: float32 gives transformers' greedy ids, bfloat16 what bfloat16 can give.

Needs the prepared default model. transformers runs on the CPU.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.load import load_model
from engine.request import Request, SamplingParams
from runtime.setup.model import default_folder
from tests.checkpoints import reference_model
from tests.engine.test_matrix import Cell, Subject, check, greedy_by_transformers, make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.model]
CELLS = [
    Cell(1, 8, "radix", True, 16),
    Cell(16, None, "radix", True, 16),
    Cell(64, 64, "naive", True, 16),
    Cell(64, None, "radix", False, 1),
]
TOP = 20
NEAR = 2.0  # times the error of transformers' own bfloat16


@cache
def subject(dtype: str) -> Subject:
    """On the GPU, with what transformers says in float32."""
    folder = default_folder()
    if not (folder / "config.json").is_file():
        pytest.skip("the default model is not prepared: ./plait test prepares it")
    config, model = load_model(folder, device="cuda", dtype=dtype)
    if dtype != "float32":
        return replace(subject("float32"), model=model)
    prompts = make_prompts(min(config.vocab_size, 1000), longest=70)
    return Subject(folder, model, prompts, greedy_by_transformers(folder, prompts, 12))


@pytest.mark.parametrize("graph_rows", [0, 4, 16])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_greedy_ids_in_float32(cell: Cell, graph_rows: int) -> None:
    check(cell, subject("float32"), device="cuda", cuda_graph_max_rows=graph_rows)


def test_logprobs_in_bfloat16_are_as_near_as_bfloat16_comes() -> None:
    """Errors are root mean squares over the likeliest ids of all prompts' next tokens."""
    ours = subject("bfloat16")
    exact_model = reference_model(ours.folder)
    exact = np.stack([_logprobs(exact_model, prompt) for prompt in ours.prompts])
    rough_model = exact_model.to(torch.bfloat16)
    rough = np.stack([_logprobs(rough_model, prompt) for prompt in ours.prompts])
    config = EngineConfig(
        ours.folder, device="cuda", max_running=16, max_kv_tokens=4096, max_model_len=128,
    )  # fmt: skip
    engine = assemble_engine(config, ours.model)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=TOP)
    for number, prompt in enumerate(ours.prompts):
        engine.submit(Request(number, prompt, params, seed=0))
    of_ours, of_theirs = list[float](), list[float]()
    while engine.has_work:
        output = engine.step()
        for number, told in () if output is None else output.logprobs:
            ids = told.top_ids[0]
            of_ours += (told.top[0] - exact[number, ids]).tolist()
            of_theirs += (rough[number, ids] - exact[number, ids]).tolist()
    engine.check_integrity()
    engine.close()
    error, limit = (float(np.sqrt(np.mean(np.square(v)))) for v in (of_ours, of_theirs))
    print(f"logprobs off by {error:.4f}, transformers' bfloat16 by {limit:.4f}")
    assert len(of_ours) == TOP * len(ours.prompts) and error <= NEAR * limit


@torch.inference_mode()
def _logprobs(model: torch.nn.Module, prompt: np.ndarray) -> np.ndarray:
    """[v] float32, of the token after the prompt."""
    logits = model(torch.tensor(prompt[None], dtype=torch.long)).logits[0, -1]
    return logits.float().log_softmax(-1).numpy()
