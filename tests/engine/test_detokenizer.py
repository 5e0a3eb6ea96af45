"""Step outputs to deltas: text, counts, ends."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer, StepText
from engine.request import Delta, Finish, Request, SamplingParams, Started, StepOutput
from engine.tokenizer import Tokenizer
from tests.fakes_tokenizers import ADDED, EOS, TEXTS, shared


def started(request_id: int, *, cached_tokens: int = 0, **params: object) -> Started:
    sampling = SamplingParams(max_new_tokens=100, **params)  # type: ignore[arg-type]
    prompt = np.array([0], np.int32)
    return Started(Request(request_id, prompt, sampling, seed=0), cached_tokens)


def step(
    *rows: tuple[int, int, Finish],
    started: tuple[Started, ...] = (),
    errors: tuple[tuple[int, str], ...] = (),
) -> StepOutput:
    """Rows are (request id, token id, finish)."""
    ids, tokens, finishes = zip(*rows, strict=True) if rows else ((), (), ())
    return StepOutput(
        step=1,
        request_ids=np.array(ids, np.int64),
        token_ids=np.array(tokens, np.int32),
        finishes=np.array(finishes, np.uint8),
        started=started,
        errors=errors,
    )


class Run:
    """One request through a detokenizer: id by id, until its end."""

    def __init__(self, text: str, *, family: str = "byte_level", **params: object) -> None:
        self.tokenizer = shared(family)
        self.ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.detokenizer = Detokenizer(Tokenizer(self.tokenizer))
        self.deltas: list[Delta] = []
        self.stop_matched: list[int] = []
        self._started = (started(7, **params),)

    def push(self, token_id: int, finish: Finish = Finish.NONE) -> StepText:
        text = self.detokenizer.on_step(step((7, token_id, finish), started=self._started))
        self._started = ()
        self.deltas += text.deltas
        self.stop_matched += text.stop_matched
        return text

    def push_all(self, last: Finish) -> "Run":
        for token_id in self.ids[:-1]:
            self.push(token_id)
        self.push(self.ids[-1], last)
        return self

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


@pytest.mark.parametrize("family", ["byte_level", "tiktoken", "byte_fallback", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
def test_deltas_are_the_decoding(family: str, text: str) -> None:
    run = Run(text, family=family).push_all(Finish.LENGTH)
    assert run.text == run.tokenizer.decode(run.ids)
    assert [i for delta in run.deltas for i in delta.token_ids] == run.ids
    counts = [delta.completion_tokens for delta in run.deltas]
    assert counts == list(range(1, len(run.ids) + 1))
    assert (run.last.finish, run.last.stop_match) == (Finish.LENGTH, None)
    assert len(run.detokenizer) == 0


def test_the_eos_counts_but_has_no_text() -> None:
    for skip in (True, False):
        run = Run("hello world" + EOS, skip_special_tokens=skip).push_all(Finish.STOP)
        assert run.text == "hello world"
        assert (run.last.finish, run.last.stop_match) == (Finish.STOP, None)
        assert run.last.token_ids == (run.tokenizer.token_to_id(EOS),)
        assert run.last.completion_tokens == len(run.ids)


def test_a_stop_token_id_cuts_only_itself() -> None:
    """Special or not, and whether special tokens are shown or not."""
    for token in (EOS, ADDED):
        for skip in (True, False):
            stop_id = shared("byte_level").token_to_id(token)
            run = Run(
                "hello world" + token, stop_token_ids=(stop_id,), skip_special_tokens=skip
            ).push_all(Finish.STOP)
            assert run.text == "hello world"
            assert run.last.stop_match == stop_id


def test_special_tokens_within_the_text() -> None:
    text = f"hello{EOS}world"
    assert Run(text).push_all(Finish.LENGTH).text == "helloworld"
    assert Run(text, skip_special_tokens=False).push_all(Finish.LENGTH).text == text


def test_a_stop_string_ends_the_response() -> None:
    run = Run("hello world, hello there", stop=("lo wo",))
    for token_id in run.ids:
        run.push(token_id)
    assert run.text == "hel"
    assert (run.last.finish, run.last.stop_match) == (Finish.STOP, "lo wo")
    assert run.stop_matched == [7]
    counted = run.ids[: run.last.completion_tokens]
    assert "lo wo" in run.tokenizer.decode(counted)
    assert "lo wo" not in run.tokenizer.decode(counted[:-1])
    assert sum(bool(delta.finish) for delta in run.deltas) == 1
    assert len(run.detokenizer) == 0


def test_what_the_engine_says_after_a_stop_string_is_dropped() -> None:
    run = Run("hello", stop=("hello",))
    for token_id in run.ids:
        run.push(token_id)
    assert run.last.finish == Finish.STOP
    for late in (Finish.NONE, Finish.LENGTH, Finish.STOP):
        assert run.push(run.ids[0], late) == StepText((), ())
    assert run.push(-1, Finish.STOP) == StepText((), ())


def test_a_marker_as_stop_string_is_never_shown() -> None:
    run = Run("hi" + EOS, stop=(EOS,), skip_special_tokens=False)
    for token_id in run.ids:
        run.push(token_id)
    assert (run.text, run.last.stop_match) == ("hi", EOS)


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP, Finish.ERROR])
def test_held_text_is_flushed_at_any_other_end(finish: Finish) -> None:
    run = Run("hello wor", stop=("world",))
    for token_id in run.ids:
        run.push(token_id)
    assert run.text == "hello "
    run.push(-1, finish)
    assert (run.text, run.last.finish, run.last.stop_match) == ("hello wor", finish, None)
    assert run.last.completion_tokens == len(run.ids)


def test_a_stop_string_completed_by_the_last_allowed_token_wins() -> None:
    run = Run("hello world", stop=("world",)).push_all(Finish.LENGTH)
    assert run.text == "hello "
    assert (run.last.finish, run.last.stop_match) == (Finish.STOP, "world")
    assert run.stop_matched == []  # the engine has ended it already


def test_an_incomplete_character_at_the_end() -> None:
    run = Run("ok 🎉")
    while "\ufffd" not in run.tokenizer.decode(run.ids):
        run.ids.pop()
    run.push_all(Finish.LENGTH)
    assert run.text == run.tokenizer.decode(run.ids)
    assert run.text.startswith("ok ") and run.text.endswith("\ufffd")
    assert all("\ufffd" not in delta.text for delta in run.deltas[:-1])


def test_an_error_reaches_its_request_alone() -> None:
    detokenizer = Detokenizer(Tokenizer(shared("byte_level")))
    a, b = shared("byte_level").encode("ab", add_special_tokens=False).ids
    detokenizer.on_step(
        step((1, a, Finish.NONE), (2, b, Finish.NONE), started=(started(1), started(2)))
    )
    output = step(
        (1, -1, Finish.ERROR),
        (2, b, Finish.NONE),
        (3, -1, Finish.ERROR),
        errors=((1, "no page left"), (3, "never ran")),
    )
    first, second, third = detokenizer.on_step(output).deltas
    assert (first.finish, first.error, first.completion_tokens) == (
        Finish.ERROR,
        "no page left",
        1,
    )
    assert (second.request_id, second.text, second.finish) == (2, "b", Finish.NONE)
    assert (third.request_id, third.error, third.token_ids) == (3, "never ran", ())
    assert len(detokenizer) == 1


def test_an_abort_is_told_with_what_was_held_back() -> None:
    run = Run("hello wor", stop=("world",), cached_tokens=3)
    for token_id in run.ids:
        run.push(token_id)
    run.push(-1, Finish.ABORT)
    assert (run.text, run.last.finish, run.last.stop_match) == ("hello wor", Finish.ABORT, None)
    assert (run.last.completion_tokens, run.last.cached_tokens) == (len(run.ids), 3)
    assert run.stop_matched == [] and len(run.detokenizer) == 0


def test_an_abort_of_a_request_that_never_started_is_told() -> None:
    text = Detokenizer(Tokenizer(shared("byte_level"))).on_step(step((99, -1, Finish.ABORT)))
    assert text == StepText((Delta(99, "", (), Finish.ABORT, 0, 0),), ())


def test_cached_tokens_are_passed_on() -> None:
    assert Run("hello", cached_tokens=5).push_all(Finish.LENGTH).last.cached_tokens == 5


@given(
    text=st.sampled_from(TEXTS),
    stop=st.lists(st.sampled_from(["at", "the", " s", "d", "天气", "🎉", "zz"]), max_size=3),
    length=st.integers(1, 60),
)
def test_text_counts_and_end_agree(text: str, stop: list[str], length: int) -> None:
    run = Run(text, stop=tuple(stop))
    run.ids = run.ids[:length]
    run.push_all(Finish.LENGTH)
    counted = run.ids[: run.last.completion_tokens]
    whole = run.tokenizer.decode(counted)
    if run.last.finish == Finish.STOP:
        match = run.last.stop_match
        assert isinstance(match, str)
        assert whole.startswith(run.text + match)
    else:
        assert counted == run.ids
        assert run.text == whole
    assert not any(each in run.text for each in stop)


def test_a_step_of_256_responses_costs_little() -> None:
    """The thread must keep up with decode steps of milliseconds; 0.8 ms on a busy core."""
    detokenizer = Detokenizer(Tokenizer(shared("byte_level")))
    ids = shared("byte_level").encode(TEXTS[0], add_special_tokens=False).ids
    requests = tuple(started(i, stop=("###",)) for i in range(256))
    detokenizer.on_step(step(*((i, ids[0], Finish.NONE) for i in range(256)), started=requests))
    best = 1.0
    for token_id in ids * 3:
        output = step(*((i, token_id, Finish.NONE) for i in range(256)))
        begun = time.thread_time()
        text = detokenizer.on_step(output)
        best = min(best, time.thread_time() - begun)
        assert len(text.deltas) == 256
    print(f"256 responses: {best * 1e3:.2f} ms a step")
    assert best < 10e-3
