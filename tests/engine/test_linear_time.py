"""Text work takes time in proportion to the text, whatever a client or a model makes of it.

CVE-2025-46560. Reasoning has its own in test_reasoning.py; what reads tool calls in
tests/http/parsing/test_long_texts.py; server-sent events in tests/client/test_events.py.
"""

import time
from collections.abc import Callable
from functools import cache

import pytest

from engine.chat_template import ChatTemplate
from engine.errors import PromptError
from engine.request import ChatPrompt, TextPrompt
from engine.stopping import StopStrings
from engine.text_decoder import TextDecoders
from engine.tokenizer import Tokenizer
from tests.fakes_tokenizers import EOS, FAMILIES, TEMPLATE, shared
from tests.timing import check_linear

MAX_CHARS = 4_000_000
# Content as Qwen3 has it: what stands before the end of reasoning is cut off.
CUTTING = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"


def timed(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


# Stop strings

STOPS: dict[str, tuple[list[str], str]] = {
    "none begins": (["\n\nUser:"], "word and "),
    "one nearly matches everywhere": (["a" * 500 + "b"], "a"),
    "halves of a marker": (["<|im_end|>"], "<|im_"),
    "a marker within itself": (["abababac", "ababd"], "ab"),
    "many begin alike": (["x" * length + "y" for length in range(1, 17)], "x"),
    "backslashes": (["\\\\\\n", '\\"}'], "\\"),
    "line breaks": (["\n" * 16], "\n" * 15 + "x"),
}


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("piece", [1, 4, 1 << 20], ids=["chars", "tokens", "whole"])
def test_stop_search(name: str, piece: int) -> None:
    stop, unit = STOPS[name]

    def seconds(chars: int) -> float:
        text = unit * (chars // len(unit))
        pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
        stops = StopStrings(stop)
        spent = timed(lambda: [*map(stops.feed, pieces)])
        assert stops.match is None
        return spent

    check_linear(seconds, 8_000)


# Tokens to text


@cache
def ids_of(family: str, text: str) -> list[int]:
    ids: list[int] = shared(family).encode(text, add_special_tokens=False).ids
    return ids


def repeated(ids: list[int], count: int) -> list[int]:
    return (ids * (count // len(ids) + 1))[:count]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["prose", "first bytes", "last bytes", "special", "all at random"])
def test_decoding(family: str, kind: str) -> None:
    ids = {
        "prose": ids_of(family, "the cat sat on the mat " * 50),
        "first bytes": ids_of(family, "\U0001f6d1")[:1],
        "last bytes": ids_of(family, "\U0001f6d1")[-1:],
        "special": ids_of(family, EOS),
        "all at random": [7 * each % 257 for each in range(257)],
    }[kind]
    decoders = TextDecoders(shared(family))

    def seconds(count: int) -> float:
        decoder = decoders.new(skip_special_tokens=False)

        def decode() -> None:
            for token_id in repeated(ids, count):
                decoder.push(token_id)
            decoder.finish()

        return timed(decode)

    check_linear(seconds, 4_000)


# Text to tokens

UNITS = ["the cat sat on the mat ", "a", " ", "天", "\n", "\u0301", "\\", "{[", EOS, EOS[:5], "'s"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("unit", UNITS)
def test_encoding(family: str, unit: str) -> None:
    tokenizer = Tokenizer(shared(family))

    def seconds(chars: int) -> float:
        prompt = TextPrompt(unit * (chars // len(unit)))
        return timed(lambda: tokenizer.encode_prompt(prompt))

    check_linear(seconds, 8_000)


# Chat templates


def test_a_template_over_many_messages() -> None:
    template = ChatTemplate(TEMPLATE, {}, MAX_CHARS)

    def seconds(count: int) -> float:
        messages = ({"role": "user", "content": "the cat"},) * count
        return timed(lambda: template.render(ChatPrompt(messages)))

    check_linear(seconds, 500)


@pytest.mark.parametrize("unit", ["a", "\\", "{", "</think>", " \n"])
def test_a_message_that_is_gone_on_with(unit: str) -> None:
    """Where its text is looked for: it nearly matches everywhere, and is not there."""
    template = ChatTemplate(CUTTING, {}, MAX_CHARS)

    def seconds(chars: int) -> float:
        user = {"role": "user", "content": unit * (4 * chars // len(unit))}
        begun = f"a</think>b{unit * (chars // len(unit))}"
        messages = (user, {"role": "assistant", "content": begun})

        def render() -> None:
            with pytest.raises(PromptError, match="does not show the last message"):
                template.render(ChatPrompt(messages, continue_final=True))

        return timed(render)

    check_linear(seconds, 20_000)


def test_a_template_that_goes_on_and_on_is_stopped() -> None:
    """At its limit, and not once all is made: CVE-2025-61620."""
    made = 0

    class Counted(str):
        __slots__ = ()

        def __str__(self) -> str:
            nonlocal made
            made += 1
            return "x" * 100

    source = "{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}"
    template = ChatTemplate(source, {}, max_chars=1000)
    with pytest.raises(PromptError, match="more than 1000 characters"):
        template.render(ChatPrompt(({"role": "user", "content": Counted("x")},)))
    assert 10 < made < 20
