"""Reasoning in step outputs: split from content, counted, and no place for stop strings."""

from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from engine.detokenizer import Detokenizer
from engine.preparation import begins_reasoning
from engine.reasoning import ReasoningSplitter
from engine.request import (
    Delta,
    Finish,
    ReasoningMarkers,
    Request,
    SamplingParams,
    Started,
    StepOutput,
    TextPrompt,
)
from engine.stopping import StopStrings
from engine.tokenizer import Tokenizer
from tests.fakes_tokenizers import EOS, build, shared

THINK = ReasoningMarkers("<think>", "</think>")
R1 = ReasoningMarkers("<think>", "</think>", always=True)
THOUGHT = "<think>\nHm.\n</think>\n\nIt is 4."


@cache
def with_markers(*, special: bool) -> tokenizers.Tokenizer:
    """Each marker is one token."""
    backend = build("byte_level")
    backend.add_tokens([AddedToken(each, special=special) for each in ("<think>", "</think>")])
    return backend


def ids_of(text: str, backend: tokenizers.Tokenizer) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def run(
    text: str | list[int],
    *,
    prompt: str = "ask",
    last: Finish = Finish.LENGTH,
    end: Finish = Finish.NONE,
    error: str | None = None,
    backend: tokenizers.Tokenizer | None = None,
    reasoning: ReasoningMarkers | None = THINK,
    **params: object,
) -> list[Delta]:
    """The deltas of a response whose tokens come one by one, the last with `last`.

    text        or its ids
    end, error  an end without a token, after them
    """
    backend = backend or shared("byte_level")
    sampling = SamplingParams(max_new_tokens=500, reasoning=reasoning, **params)  # type: ignore[arg-type]
    prompt_ids = np.array(ids_of(prompt, backend), np.int32)
    opened = reasoning is not None and begins_reasoning(
        Tokenizer(backend), reasoning, TextPrompt(prompt), prompt_ids
    )
    request = Request(3, prompt_ids, sampling, seed=0, begins_reasoning=opened)
    started: tuple[Started, ...] = (Started(request, 0),)
    ids = ids_of(text, backend) if isinstance(text, str) else text
    rows = [(token_id, Finish.NONE) for token_id in ids]
    rows[-1] = (rows[-1][0], Finish.NONE if end else last)
    rows += [(-1, end)] if end else []
    detokenizer = Detokenizer(Tokenizer(backend))
    deltas: list[Delta] = []
    for token_id, finish in rows:
        output = StepOutput(
            1, np.array([3]), np.array([token_id], np.int32), np.array([finish], np.uint8),
            started, ((3, error),) if error else (),
        )  # fmt: skip
        started = ()
        deltas += detokenizer.on_step(output).deltas
        if deltas and deltas[-1].finish:
            break
    assert len(detokenizer) == 0
    return deltas


def told(deltas: list[Delta]) -> tuple[str, str]:
    """(reasoning, content)"""
    return "".join(each.reasoning for each in deltas), "".join(each.text for each in deltas)


@pytest.mark.parametrize("family", ["byte_level", "tiktoken", "gemma"])
def test_reasoning_and_content_are_apart(family: str) -> None:
    text = "<think>\nSo: 今天 🎉.\n</think>\n\nIt is 天气 🎉."
    deltas = run(text, backend=shared(family))
    assert told(deltas) == ("So: 今天 🎉.", "It is 天气 🎉.")
    assert [each.completion_tokens for each in deltas] == list(range(1, len(deltas) + 1))


def test_without_markers_in_the_parameters_all_text_is_content() -> None:
    deltas = run(THOUGHT, reasoning=None, prompt="<think>")
    assert told(deltas) == ("", THOUGHT)
    assert deltas[-1].reasoning_tokens == 0


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_markers_that_are_tokens(special: bool, skip: bool) -> None:
    """Special ones too: they are no text that a client sees, but they are the markers."""
    backend = with_markers(special=special)
    deltas = run(THOUGHT + EOS, backend=backend, last=Finish.STOP, skip_special_tokens=skip)
    assert told(deltas) == ("Hm.", "It is 4.")
    closing = backend.token_to_id("</think>")
    until_closing = [each.token_ids for each in deltas].index((closing,)) + 1
    assert deltas[-1].reasoning_tokens == until_closing


def test_other_special_tokens_are_skipped_as_ever() -> None:
    backend = with_markers(special=True)
    assert told(run(f"<think>a{EOS}b</think>c{EOS}d", backend=backend)) == ("ab", "cd")


# Whether the prompt opened reasoning


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("ask<think>", True),
        ("ask\n<think>\n", True),
        ("ask" + "<think>\n\n \n\t\n", True),
        ("a long prompt " * 40 + "<think>\n", True),
        ("ask\n<think>\n\n</think>\n\n", False),
        ("What is <think>?", False),
        ("ask", False),
        ("<think", False),
    ],
)
def test_the_prompt_may_have_opened_it(prompt: str, opened: bool, special: bool | None) -> None:
    backend = None if special is None else with_markers(special=special)
    deltas = run("Hm.\n</think>\n\n4", prompt=prompt, backend=backend)
    if opened:
        assert told(deltas) == ("Hm.", "4")
        assert deltas[-1].reasoning_tokens > 2
    else:
        assert told(deltas) == ("", "Hm.\n</think>\n\n4")
        assert deltas[-1].reasoning_tokens == 0


def test_some_models_always_begin_inside() -> None:
    assert told(run("Hm.\n</think>\n\n4", reasoning=R1)) == ("Hm.", "4")
    assert told(run(THOUGHT, reasoning=R1)) == ("Hm.", "It is 4.")


def test_a_prompt_that_is_shown_is_not_split() -> None:
    first, *_ = run("a</think>b", prompt="why?<think>", echo=True)
    assert first.prompt is not None and first.prompt.text == "why?<think>"


# Stop strings


@pytest.mark.parametrize(
    ("text", "stop", "content", "match"),
    [
        # Before the closing marker: no place for one.
        ("<think>a STOP b</think>c", "STOP", "c", None),
        ("<think>a STOP b</think>c STOP d", "STOP", "c ", "STOP"),
        # Across it, either way.
        ("<think>a ST</think>OP d", "STOP", "OP d", None),
        ("<think>a b</think>c", "b</think>", "c", None),
        ("<think>a b</think>c d", "</think>c", "c d", None),
        # Line breaks between the two are no content: this would end every answer at once.
        ("<think>a\n\nb\n\n</think>\n\nc\n\nd", "\n\n", "c", "\n\n"),
        ("<think>a</think>\n", "\n", "", None),
        # Behind it.
        ("<think>a</think>STOP c", "STOP", "", "STOP"),
        ("<think>a</think>c ST", "STOP", "c ST", None),
        # Equal to a marker or a part of one.
        ("<think>a</think>c", "<think>", "c", None),
        ("<think>a</think>c", "</think>", "c", None),
        ("<think>a</think>c", "<", "c", None),
        ("<think>a</think>c", "think>", "c", None),
        ("<think>a</think>c </think> d", "</think>", "c ", "</think>"),
        # An opening that never comes is content.
        ("<thing> STOP", "STOP", "<thing> ", "STOP"),
        ("<thing> STOP", "<thi", "", "<thi"),
        ("<thi", "<thi", "", "<thi"),
        ("<thi", "<think>", "<thi", None),
        (" \n STOP", "\n", " ", "\n"),
    ],
)
@pytest.mark.parametrize("tokens", ["many", "one"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_of_content(
    text: str, stop: str, content: str, match: str | None, tokens: str, include: bool
) -> None:
    backend = with_markers(special=False) if tokens == "one" else None
    deltas = run(text, stop=(stop,), backend=backend, include_stop=include)
    reasoning = text.partition("<think>")[2].partition("</think>")[0].strip()
    shown = content + match if include and match else content
    assert told(deltas) == (reasoning, shown)
    assert deltas[-1].stop_match == match
    assert deltas[-1].finish == (Finish.STOP if match else Finish.LENGTH)


def test_a_stop_string_that_the_thoughts_mention() -> None:
    """vllm#14170, #14399: the response ended inside reasoning, its content was "/think>"."""
    text = "<think>\nI must write ✿RESULT✿ at the end.\n</think>\n\nIt is 4. ✿RESULT✿ 4"
    for special in (None, False, True):
        backend = None if special is None else with_markers(special=special)
        deltas = run(text, stop=("✿RESULT✿",), backend=backend)
        assert told(deltas) == ("I must write ✿RESULT✿ at the end.", "It is 4. ")
        assert (deltas[-1].finish, deltas[-1].stop_match) == (Finish.STOP, "✿RESULT✿")


def test_a_stop_token_id_ends_it_anywhere() -> None:
    backend = shared("byte_level")
    stop_id = backend.token_to_id(EOS)
    deltas = run("<think>Hm." + EOS, last=Finish.STOP, stop_token_ids=(stop_id,), stop=("zz",))
    assert told(deltas) == ("Hm.", "")
    assert (deltas[-1].finish, deltas[-1].stop_match) == (Finish.STOP, stop_id)


def test_the_minimal_length_is_of_all_tokens() -> None:
    text = "<think>a</think>bXcXd"
    before = len(ids_of("<think>a</think>bX", shared("byte_level")))
    assert told(run(text, stop=("X",), min_tokens=before)) == ("a", "bXc")
    assert told(run(text, stop=("X",), min_tokens=before - 1)) == ("a", "b")


# Ends

ENDS = [
    ("<think>Hm, \n", ("Hm,", "")),
    ("<think>Hm.\n</thi", ("Hm.\n</thi", "")),
    ("<think>", ("", "")),
    ("\n<thi", ("", "\n<thi")),
    ("<think>Hm.\n</think>\n\n", ("Hm.", "")),
    ("<think>Hm.\n</think>\n\nIt is ST", ("Hm.", "It is ST")),
]


@pytest.mark.parametrize(("text", "expected"), ENDS)
@pytest.mark.parametrize("stop", [(), ("STOP",)])
def test_what_is_held_comes_at_any_end(
    text: str, expected: tuple[str, str], stop: tuple[str, ...]
) -> None:
    whole = run(text, stop=stop)
    assert told(whole) == expected and whole[-1].finish == Finish.LENGTH
    ended = run(text + EOS, stop=stop, last=Finish.STOP)
    assert told(ended) == expected and ended[-1].finish == Finish.STOP
    for end, error in ((Finish.ABORT, None), (Finish.ERROR, "no page left")):
        deltas = run(text, stop=stop, end=end, error=error)
        assert told(deltas) == expected
        assert (deltas[-1].finish, deltas[-1].error) == (end, error)
        assert deltas[-1].reasoning_tokens == whole[-1].reasoning_tokens


def test_half_a_character_at_the_end_of_reasoning() -> None:
    backend = shared("byte_level")
    ids = ids_of("<think>ok 🎉", backend)[:-1]
    assert backend.decode(ids).endswith("\ufffd")
    deltas = run(ids, end=Finish.ABORT)
    assert told(deltas) == ("ok \ufffd", "")
    assert deltas[-1].reasoning_tokens == deltas[-1].completion_tokens == len(ids)


# Against the definition

PIECES = ["<think>", "</think>", "<", "</", "think>", "STOP", "ST", "OP", " ", "\n", "a", "b"]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)


@settings(deadline=None)
@given(
    text=texts,
    opened=st.booleans(),
    stop=st.lists(st.sampled_from([*PIECES, "\n\n", "ab"]), max_size=2, unique=True),
)
def test_stop_strings_cut_the_content_of_the_whole_text(
    text: str, opened: bool, stop: list[str]
) -> None:
    splitter = ReasoningSplitter(THINK, opened=opened)
    pairs = [splitter.feed(text), splitter.finish()]
    reasoning, content = ("".join(texts) for texts in zip(*pairs, strict=True))
    stops = StopStrings(stop)
    cut = stops.feed(content)
    cut += "" if stops.match else stops.flush()
    deltas = run(text, prompt="<think>\n" if opened else "ask", stop=tuple(stop))
    assert told(deltas) == (reasoning, cut)
    assert deltas[-1].stop_match == stops.match


@settings(deadline=None)
@given(text=texts, opened=st.booleans(), tokens=st.sampled_from(["many", "one"]))
def test_reasoning_tokens_are_exact(text: str, opened: bool, tokens: str) -> None:
    backend = with_markers(special=False) if tokens == "one" else shared("byte_level")
    begin = 0 if opened else len(text) - len(text.lstrip(" \n"))
    if not opened and not text[begin:].startswith("<think>"):
        begin = len(text)
    closing = text.find("</think>", begin)
    end = len(text) if closing < 0 else closing + len("</think>")
    expected, position = 0, 0
    for token_id in ids_of(text, backend):
        after = position + len(backend.decode([token_id]))
        expected += position < end and after > begin
        position = after
    assert position == len(text)
    deltas = run(text, prompt="<think>" if opened else "ask", backend=backend)
    assert deltas[-1].reasoning_tokens == expected
