"""Penalties, biases and logprobs, from a request to its tokens: as transformers' logits say.

The CUDA executor runs here on a host too, with plain operations in the place of its kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache_factory import build_prefix_cache
from engine.core import Engine
from engine.cpu_executor import CpuExecutor
from engine.cuda_executor import CudaExecutor
from engine.executor import Executor
from engine.load import load_model
from engine.pages import PagePool
from engine.request import Finish, Logprobs, Request, SamplingParams
from engine.scheduler import Scheduler
from gpu_ops.plain_decode import PlainSampler
from tests.checkpoints import VOCAB, reference_model
from tests.engine.conftest import Expected
from tests.fakes_executor import fake_engine
from tests.fakes_streams import HostStreams

EOS = 258
NEW = 12
KINDS = ["cpu", "host"]
Sequences = tuple[tuple[int, ...], ...]


def build(folder: Path, kind: str, *, chunk: int = 64, overlap: bool = True) -> Engine:
    _, model = load_model(folder, dtype="float32", device="cpu")
    pages, page_size, rows = 64, 8, 6
    shape: dict[str, Any] = {
        "pages": pages, "page_size": page_size, "max_rows": rows, "max_pages_per_row": 16
    }  # fmt: skip
    executor: Executor
    if kind == "cpu":
        executor = CpuExecutor(model, **shape)
    else:
        executor = CudaExecutor(model, **shape, streams=HostStreams(), sampler=PlainSampler())
    scheduler = Scheduler(
        pool=PagePool(pages), cache=build_prefix_cache("radix", page_size), max_running=rows,
        max_model_len=128, prefill_budget=chunk, eos_ids=(EOS,), vocab_size=VOCAB,
    )  # fmt: skip
    return fake_engine(scheduler, executor, overlap=overlap)


@dataclass
class Output:
    """What came of one request."""

    ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None


def run(
    engine: Engine,
    asked: list[tuple[list[int], SamplingParams]],
    bad: dict[int, Sequences] | None = None,
) -> list[Output]:
    """bad  the bad sequences of some, by their numbers"""
    outputs = [Output() for _ in asked]
    for number, (prompt, params) in enumerate(asked):
        seed, ids = 0 if params.seed is None else params.seed, np.array(prompt, np.int32)
        sequences = (bad or {}).get(number, ())
        engine.submit(Request(number, ids, params, seed=seed, bad_sequences=sequences))
    while engine.has_work:
        step = engine.step()
        if step is None:
            continue
        for started in step.started:
            outputs[started.request.id].prompt_logprobs = started.prompt_logprobs
        for number, logprobs in step.logprobs:
            outputs[number].logprobs.append(logprobs)
        for number, token_id, finish in zip(
            step.request_ids, step.token_ids, step.finishes, strict=True
        ):
            outputs[number].ids.append(int(token_id))
            outputs[number].finish = Finish(finish)
    engine.check_integrity()
    return outputs


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True, **params)


def logprobs_by_transformers(folder: Path, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] float64: of what follows each token."""
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_models_own(
    kind: str, chunk: int, expected: Callable[[str], Expected]
) -> None:
    """Also beside a temperature and penalties, and whatever the prompt was cut into."""
    case = expected("qwen3")
    engine = build(case.folder, kind, chunk=chunk)
    more = {"presence_penalty": 1.5, "logit_bias": ((7, 3.0),)}
    asked = [
        (case.prompts[2], greedy(logprobs=3, prompt_logprobs=2)),
        (case.prompts[1], greedy()),
        (case.prompts[3], SamplingParams(max_new_tokens=NEW, seed=5, logprobs=0, **more)),
        (case.prompts[2], greedy(prompt_logprobs=0)),
        (case.prompts[0], greedy(logprobs=1, prompt_logprobs=1)),
    ]
    outputs = run(engine, asked)
    assert outputs[0].ids[:NEW] == case.greedy[2][:NEW]
    for (prompt, params), output in zip(asked, outputs, strict=True):
        want = logprobs_by_transformers(case.folder, prompt + output.ids)
        if params.logprobs is None:
            assert not output.logprobs
        else:
            told = Logprobs.joined([one for one in output.logprobs])
            check(told, want[len(prompt) - 1 : -1], output.ids, params.logprobs)
        if params.prompt_logprobs is None or len(prompt) == 1:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs is not None
            check(output.prompt_logprobs, want[: len(prompt) - 1], prompt[1:],
                  params.prompt_logprobs)  # fmt: skip


def check(told: Logprobs, want: torch.Tensor, ids: list[int], k: int) -> None:
    own = want[torch.arange(len(ids)), torch.tensor(ids)]
    np.testing.assert_allclose(told.chosen, own, atol=1e-4)
    assert told.ranks.tolist() == (1 + (want > own[:, None]).sum(1)).tolist()
    best = want.topk(k) if k else None
    if best is not None:
        assert told.top_ids[:, :k].tolist() == best.indices.tolist()
        np.testing.assert_allclose(told.top[:, :k], best.values, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_biases_and_minimal_lengths_act_as_defined(
    kind: str, expected: Callable[[str], Expected]
) -> None:
    """Greedy tokens, each checked against transformers' logits of all before it."""
    case = expected("llama")
    favourite = case.greedy[2][0]
    variants: list[dict[str, Any]] = [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 6.0, "frequency_penalty": 3.0},
        {"frequency_penalty": -6.0},
        {"logit_bias": ((favourite, -100.0), (11, 4.0))},
        {"allowed_token_ids": (3, 8, 200, 201)},
        {"min_tokens": 4, "stop_token_ids": tuple(set(case.greedy[2][:6]))},
    ]
    prompt, reference = case.prompts[2], reference_model(case.folder)
    outputs = run(build(case.folder, kind), [(prompt, greedy(**one)) for one in variants])
    assert all(output.ids != case.greedy[2][:NEW] for output in outputs), "a rule without effect"
    for variant, output in zip(variants, outputs, strict=True):
        params = greedy(**variant)
        for at in range(len(output.ids)):
            ids = prompt + output.ids[:at]
            with torch.no_grad():
                logits = reference(torch.tensor([ids])).logits[0, -1].double()
            assert output.ids[at] == int(adjusted(logits, params, prompt, output.ids[:at]).argmax())
    stopped = outputs[-1]
    assert len(stopped.ids) >= 4 and not set(stopped.ids[:4]) & set(variants[-1]["stop_token_ids"])


def adjusted(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], made: list[int]
) -> torch.Tensor:
    seen = torch.tensor(sorted({*prompt, *made}))
    values = logits[seen]
    penalty = params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = torch.bincount(torch.tensor(made, dtype=torch.long), minlength=VOCAB)
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if len(made) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -1e30
    if params.allowed_token_ids is not None:
        forbidden = torch.ones(VOCAB, dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
        logits[forbidden] = -torch.inf
    return logits


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_words_never_come(
    kind: str, overlap: bool, expected: Callable[[str], Expected]
) -> None:
    """Each greedy token is the best that completes no bad sequence; others go on as ever."""
    case = expected("llama")
    prompt, free = case.prompts[2], case.greedy[2][:NEW]
    bad: Sequences = (tuple(free[:1]), tuple(free[2:4]), tuple(free[1:2]), (prompt[-1], free[0]))
    penalised = greedy(repetition_penalty=1.3, allowed_token_ids=tuple(range(100)))
    asked = [(prompt, greedy()), (prompt, greedy()), (prompt, penalised)]
    variants: list[Sequences] = [(), (tuple(free[2:4]), (7,)), ()]
    first = run(build(case.folder, kind, overlap=overlap), asked, {1: variants[1]})
    # What comes instead may be bad in its turn.
    variants[2] = tuple(zip(first[2].ids, first[2].ids[1:], strict=False))[:3]
    bad += ((first[1].ids[3], first[1].ids[4]),)
    outputs = run(build(case.folder, kind, overlap=overlap), asked, {1: bad, 2: variants[2]})
    assert outputs[0].ids == free
    reference = reference_model(case.folder)
    for output, (_, params), sequences in zip(
        outputs[1:], asked[1:], (bad, variants[2]), strict=True
    ):
        for at, token_id in enumerate(output.ids):
            ids = prompt + output.ids[:at]
            with torch.no_grad():
                logits = reference(torch.tensor([ids])).logits[0, -1].double()
            logits = adjusted(logits, params, prompt, output.ids[:at])
            for *before, last in sequences:
                if output.ids[:at][at - len(before) :] == before:
                    logits[last] = -torch.inf
            assert token_id == int(logits.argmax())
    alone = run(build(case.folder, kind, overlap=overlap), asked[1:2], {0: bad})[0]
    assert alone.ids == outputs[1].ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_to_which_nothing_is_left_ends_alone(
    kind: str, expected: Callable[[str], Expected]
) -> None:
    case = expected("llama")
    asked = [
        (case.prompts[2], greedy(allowed_token_ids=(5, 6))),
        (case.prompts[2], greedy()),
        (case.prompts[1], greedy(allowed_token_ids=(5,))),
    ]
    every_pair = tuple((one, other) for one in (5, 6) for other in (5, 6))
    outputs = run(build(case.folder, kind), asked, {0: every_pair, 2: ((5,), (5, 5))})
    assert [output.finish for output in outputs] == [
        Finish.UNSATISFIABLE, Finish.LENGTH, Finish.UNSATISFIABLE,
    ]  # fmt: skip
    assert outputs[0].ids in ([5], [6]) and outputs[1].ids == case.greedy[2][:NEW]
    assert outputs[2].ids == [-1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_nothing(
    kind: str, overlap: bool, expected: Callable[[str], Expected]
) -> None:
    """A penalised request and a plain one give the same tokens alone and together."""
    case = expected("llama")
    sampled = SamplingParams(max_new_tokens=NEW, temperature=0.9, seed=3, frequency_penalty=1.1)
    asked = [
        (case.prompts[3], greedy()),
        (case.prompts[2], sampled),
        (case.prompts[1], greedy(repetition_penalty=1.3, logprobs=1)),
        (case.prompts[2], greedy(allowed_token_ids=(1, 2, 3), min_tokens=2)),
    ]
    together = run(build(case.folder, kind, overlap=overlap), asked)
    for one, output in zip(asked, together, strict=True):
        alone = run(build(case.folder, kind, overlap=overlap), [one])[0]
        assert alone.ids == output.ids
    assert together[0].ids == case.greedy[3][:NEW]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_alone_can_be_scored(kind: str, expected: Callable[[str], Expected]) -> None:
    case = expected("llama")
    params = SamplingParams(max_new_tokens=0, temperature=0.0, prompt_logprobs=1)
    output = run(build(case.folder, kind), [(case.prompts[2], params)])[0]
    assert output.finish == Finish.LENGTH and output.prompt_logprobs is not None
    want = logprobs_by_transformers(case.folder, case.prompts[2])[:-1]
    check(output.prompt_logprobs, want, case.prompts[2][1:], 1)
