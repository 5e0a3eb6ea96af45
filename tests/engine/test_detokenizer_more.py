"""What few requests ask of a response beyond its text: logprobs, the prompt, included stops."""

import math

import numpy as np
import pytest

from engine.detokenizer import Detokenizer
from engine.request import (
    Delta,
    Finish,
    Logprobs,
    ReasoningMarkers,
    Request,
    SamplingParams,
    Started,
    StepOutput,
)
from engine.tokenizer import Tokenizer
from tests.fakes_tokenizers import shared


def logprobs(ids: list[int], k: int) -> Logprobs:
    """As many likeliest ids as asked for: those after the token's own."""
    top = np.array([[token_id + 1 + i for i in range(k)] for token_id in ids], np.int32)
    return Logprobs(
        -np.arange(1, len(ids) + 1, dtype=np.float32),
        np.full(len(ids), 2, np.int32),
        top.reshape(len(ids), k),
        np.full((len(ids), k), -0.5, np.float32),
    )


def run(
    text: str,
    *,
    prompt: str = "ask",
    last: Finish = Finish.LENGTH,
    of_prompt: bool = False,
    family: str = "byte_level",
    max_new_tokens: int = 50,
    **params: object,
) -> list[Delta]:
    """The deltas of a response whose tokens come one by one."""
    backend = shared(family)
    ids = backend.encode(text, add_special_tokens=False).ids
    prompt_ids = backend.encode(prompt, add_special_tokens=False).ids
    sampling = SamplingParams(max_new_tokens=max_new_tokens, **params)  # type: ignore[arg-type]
    told = logprobs(prompt_ids[1:], 1) if of_prompt else None
    opened = prompt.endswith("<think>")
    request = Request(3, np.array(prompt_ids, np.int32), sampling, seed=0, begins_reasoning=opened)
    started: tuple[Started, ...] = (Started(request, 0, told),)
    detokenizer = Detokenizer(Tokenizer(backend))
    deltas: list[Delta] = []
    for index, token_id in enumerate(ids, 1):
        finish = last if index == len(ids) else Finish.NONE
        k = sampling.logprobs
        output = StepOutput(
            1, np.array([3]), np.array([token_id], np.int32), np.array([finish], np.uint8),
            started, logprobs=() if k is None else ((3, logprobs([token_id], k)),),
        )  # fmt: skip
        started = ()
        deltas += detokenizer.on_step(output).deltas
    return deltas


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "gemma", "tiktoken"])
@pytest.mark.parametrize("k", [0, 2])
def test_each_token_is_told_with_its_text_and_its_bytes(family: str, k: int) -> None:
    text = "hi 今天 😀!"
    deltas = run(text, family=family, logprobs=k)
    scores = [score for delta in deltas for score in delta.scores]
    assert len(scores) == len(deltas)
    assert b"".join(score.token.utf8 for score in scores).decode().strip() == text
    for score in scores:
        assert score.token.text == score.token.utf8.decode("utf-8", "replace")
        assert (score.token.logprob, score.rank, len(score.top)) == (-1.0, 2, k)
        assert all(one.logprob == -0.5 for one in score.top)


def tokens_told(deltas: list[Delta]) -> str:
    return b"".join(s.token.utf8 for delta in deltas for s in delta.scores).decode()


@pytest.mark.parametrize("stop", ["world", "orl", "d", "lo wo", "never"])
def test_scores_are_of_the_content_and_come_no_sooner_than_it(stop: str) -> None:
    """A stop string is not told by its tokens either; a token that holds more than it is."""
    text = "hello world, hello there"
    deltas = run(text, logprobs=1, stop=(stop,))
    sent = told = last = ""
    for delta in deltas:
        sent += delta.text
        told += b"".join(score.token.utf8 for score in delta.scores).decode()
        last = delta.scores[-1].token.text if delta.scores else last
        assert told[: len(told) - len(last)] == sent[: len(told) - len(last)]
        assert len(told) - len(last) <= len(sent), "a token is told before its text"
    assert sent == text.partition(stop)[0]
    assert told.startswith(sent) and len(told) - len(last) <= len(sent)


def test_a_stop_string_that_is_part_of_the_text_has_scores() -> None:
    deltas = run("hello world, hello", logprobs=0, stop=("lo wo",), include_stop=True)
    assert tokens_told(deltas).startswith("hello wo")


@pytest.mark.parametrize("last", [Finish.STOP, Finish.LENGTH])
@pytest.mark.parametrize("include", [False, True])
def test_an_id_that_ends_the_text_is_told_apart(last: Finish, include: bool) -> None:
    deltas = run("hello world", logprobs=0, last=last, include_stop=include)
    is_apart = last is Finish.STOP and not include
    assert (deltas[-1].ending is not None) is is_apart
    assert all(delta.ending is None for delta in deltas[:-1])
    text = "".join(delta.text for delta in deltas)
    assert tokens_told(deltas) == text and (text == "hello world") is not is_apart


@pytest.mark.parametrize(
    ("text", "prompt", "content"),
    [
        ("<think>\nHm.\n</think>\n\nIt is 4.", "ask", "It is 4."),
        ("Hm.</think>It is 4.", "ask<think>", "It is 4."),
        ("<the answer>", "ask", "<the answer>"),
        ("<think>Hm. It", "ask", ""),
    ],
)
def test_reasoning_has_no_scores(text: str, prompt: str, content: str) -> None:
    markers = ReasoningMarkers("<think>", "</think>")
    deltas = run(text, prompt=prompt, logprobs=0, reasoning=markers)
    assert "".join(delta.text for delta in deltas) == content
    told = tokens_told(deltas)
    # The token that content begins with may begin before it.
    assert told.endswith(content) and len(told) <= len(content) + 2


def test_nothing_more_is_told_where_nothing_was_asked() -> None:
    assert all(not delta.scores and delta.prompt is None for delta in run("some text"))


def test_the_prompt_comes_once_with_the_first_delta() -> None:
    deltas = run("some text", prompt="what?", echo=True)
    assert deltas[0].prompt is not None and deltas[0].prompt.text == "what?"
    assert not deltas[0].prompt.scores
    assert all(delta.prompt is None for delta in deltas[1:])


def test_the_prompts_scores_are_of_all_its_tokens_but_the_first() -> None:
    first, *others = run("x", prompt="what?", prompt_logprobs=1, of_prompt=True)
    assert not others and first.prompt is not None
    assert first.prompt.text == "" and math.isnan(first.prompt.first.logprob)
    told = [first.prompt.first, *(score.token for score in first.prompt.scores)]
    assert b"".join(token.utf8 for token in told) == b"what?"
    assert [token.logprob for token in told[1:]] == [-1.0 - i for i in range(len(told) - 1)]


def test_what_is_drawn_to_score_a_prompt_is_nobodys() -> None:
    (delta,) = run("x", prompt="abc", max_new_tokens=0, echo=True, prompt_logprobs=1, logprobs=1,
                   of_prompt=True, last=Finish.STOP)  # fmt: skip
    assert (delta.text, delta.token_ids, delta.scores) == ("", (), ())
    assert (delta.finish, delta.completion_tokens) == (Finish.LENGTH, 0)
    assert delta.prompt is not None and delta.prompt.text == "abc"


def test_a_stop_string_is_part_of_the_text_where_it_is_to_be() -> None:
    deltas = run("hello world, hello", stop=("lo wo",), include_stop=True)
    assert "".join(delta.text for delta in deltas) == "hello wo"
    assert deltas[-1].stop_match == "lo wo"


def test_a_stop_token_is_part_of_the_text_where_it_is_to_be() -> None:
    last = shared("byte_level").encode("world!", add_special_tokens=False).ids[-1]
    stop = {"stop_token_ids": (last,), "last": Finish.STOP}
    for include in (False, True):
        deltas = run("world!", include_stop=include, **stop)  # type: ignore[arg-type]
        text = "".join(delta.text for delta in deltas)
        assert text == ("world!" if include else shared("byte_level").decode(
            shared("byte_level").encode("world!", add_special_tokens=False).ids[:-1]
        ))  # fmt: skip


def test_no_stop_string_counts_within_the_minimal_length() -> None:
    text = "aXbXcXd"
    assert len(shared("byte_level").encode(text, add_special_tokens=False).ids) == len(text)
    deltas = run(text, stop=("X",), min_tokens=3)
    assert "".join(delta.text for delta in deltas) == "aXb"
    assert deltas[-1].completion_tokens == 4
