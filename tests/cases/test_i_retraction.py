"""A request that is retracted keeps its tokens, and all that follows from them.

What a row has beyond its KV (penalised ids, a place in a grammar, a minimal length, logprobs that
were told) is where engines go wrong after a preemption.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.forecast import OutputForecast
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import Regex
from engine.grammar.vocabulary import Vocabulary
from engine.load import load_model
from engine.models.decoder import Decoder
from engine.request import CompiledGrammar, Finish, Logprobs, Request, SamplingParams
from engine.tokenizer import Tokenizer
from tests.checkpoints import EOS

NEW, PAGE, PROMPT = 40, 8, 24  # tokens
ENOUGH, SCARCE = 64, 18  # pages; six requests fill 48
PARAMS = (
    SamplingParams(NEW, temperature=0.9, seed=3, frequency_penalty=1.1, presence_penalty=0.5),
    SamplingParams(NEW, temperature=0.0, repetition_penalty=1.3, logprobs=2, prompt_logprobs=1),
    SamplingParams(NEW, temperature=0.0, min_tokens=35, stop_token_ids=tuple(range(200))),
    SamplingParams(NEW, temperature=1.2, seed=9, logit_bias=((5, 3.0),), prompt_logprobs=0),
    SamplingParams(NEW, temperature=1.0, seed=4),  # under a grammar
    SamplingParams(NEW, temperature=0.0),
)
CONSTRAINED = 4
WORDED = 5  # has bad words
Sequences = tuple[tuple[int, ...], ...]
Told = tuple[tuple[int, ...], Finish, int, tuple[float, ...]]


@pytest.fixture(scope="module")
def model(case_folder: Path) -> Decoder:
    return load_model(case_folder, dtype="float32", device="cpu")[1]


@pytest.fixture(scope="module")
def grammar(case_folder: Path) -> Iterator[CompiledGrammar]:
    """Each word in it tells how many came before."""
    tokenizer = Tokenizer.load(case_folder)
    compiler = GrammarCompiler(Vocabulary(tokenizer.backend, tokenizer.vocab_size, (EOS,)))
    yield compiler.compile(Regex("a[b-f]{7}g[h-m]{9}n[o-z]{50}"))
    compiler.close()


class Careless(OutputForecast):
    """Lets too many in, and does not learn."""

    def retracted(self) -> None:
        pass


def engine_of(model: Decoder, folder: Path, pages: int, *, overlap: bool) -> Engine:
    config = EngineConfig(
        folder, page_size=PAGE, max_running=8, max_model_len=128, max_kv_tokens=pages * PAGE,
        prefill_budget=16, overlap=overlap, cpu_threads=1,
    )  # fmt: skip
    engine = assemble_engine(config, model)
    engine._scheduler.admission.forecast = Careless(share=0.0)
    return engine


def run(
    engine: Engine, order: list[int], grammar: CompiledGrammar, bad: Sequences = ()
) -> dict[int, Told]:
    """Ids, end, logprobs of the output and of the prompt; by number of the request."""
    dice = np.random.default_rng(0)
    prompts = dice.integers(0, 256, (len(PARAMS), PROMPT)).astype(np.int32)
    for number in order:
        constrained = grammar if number == CONSTRAINED else None
        sequences = bad if number == WORDED else ()
        engine.submit(
            Request(
                number, prompts[number], PARAMS[number], 7, grammar=constrained,
                bad_sequences=sequences,
            )
        )  # fmt: skip
    ids: dict[int, list[int]] = {number: [] for number in order}
    finishes = dict.fromkeys(order, Finish.NONE)
    own: dict[int, list[Logprobs]] = {number: [] for number in order}
    of_prompt: dict[int, tuple[float, ...]] = dict.fromkeys(order, ())
    while engine.has_work:
        step = engine.step()
        if step is None:
            continue
        for started in step.started:
            told = started.prompt_logprobs
            assert not ids[started.request.id], "a start is told once"
            of_prompt[started.request.id] = () if told is None else tuple(told.chosen.tolist())
        for number, one in step.logprobs:
            own[number].append(one)
        for number, token_id, finish in zip(
            step.request_ids.tolist(), step.token_ids.tolist(), step.finishes, strict=True
        ):
            ids[number].append(token_id)
            finishes[number] = Finish(finish)
    engine.check_integrity()
    return {
        number: (tuple(ids[number]), finishes[number], len(own[number]), of_prompt[number])
        for number in order
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_a_retraction_changes_nothing(
    model: Decoder, case_folder: Path, grammar: CompiledGrammar, overlap: bool
) -> None:
    """Each is the youngest once, with overlap or without: that one is retracted."""
    everyone = list(range(len(PARAMS)))
    roomy = engine_of(model, case_folder, ENOUGH, overlap=overlap)
    free = run(roomy, [WORDED], grammar)[WORDED][0]
    bad = (free[2:4], free[:1] + free[6:7])
    expected = run(roomy, everyone, grammar, bad)
    assert roomy.stats().retractions == 0
    assert expected[WORDED][0][:3] == free[:3] and expected[WORDED][0] != free
    assert expected[CONSTRAINED][1] == Finish.LENGTH and expected[1][2] == NEW
    assert len(expected[2][0]) > 35 and len(expected[1][3]) == PROMPT - 1
    for first in everyone[overlap::2]:
        scarce = engine_of(model, case_folder, SCARCE, overlap=overlap)
        told = run(scarce, everyone[first:] + everyone[:first], grammar, bad)
        assert scarce.stats().retractions >= 1
        for number in everyone:
            *exact, of_prompt = expected[number]
            assert list(told[number][:3]) == exact, number
            assert told[number][3] == pytest.approx(of_prompt, abs=1e-4)
