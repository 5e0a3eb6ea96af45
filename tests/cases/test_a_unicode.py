"""Characters of several tokens: vllm#8627, ai-dynamo/dynamo#12630, TGI#333.

Also tests/engine/test_text_decoder.py, which draws random ids of every family.
"""

import itertools
from functools import cache

import numpy as np
import pytest
import tokenizers

from engine.detokenizer import Detokenizer
from engine.request import Finish, Request, SamplingParams, Started, StepOutput
from engine.tokenizer import Tokenizer
from runtime.setup.model import default_folder
from tests.cases.asking import (
    chat,
    chat_chunks,
    choices_of,
    complete,
    completion_chunks,
    forced,
    message_of,
    text_of,
)
from tests.fakes_tokenizers import shared
from tests.server_process import ServerProcess

# What "写一首诗" and "今天天气如何？" were answered with, and what else takes several tokens.
TEXTS = ("今天天气如何？", "写一首诗：床前明月光", "naïve 👩‍👩‍👧 ประเทศไทย")
REAL = "SmolLM2"
FAMILIES = (
    *("byte_level", "tiktoken", "byte_fallback", "gemma"),
    pytest.param(REAL, marks=pytest.mark.model),
)


@cache
def backend_of(family: str) -> tokenizers.Tokenizer:
    if family != REAL:
        return shared(family)
    file = default_folder() / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"{file} is not prepared: ./plait test does that")
    return tokenizers.Tokenizer.from_file(str(file))


def texts_by_id(family: str, ids: list[int]) -> list[str]:
    """What each id lets out."""
    detokenizer = Detokenizer(Tokenizer(backend_of(family)))
    request = Request(1, np.array([0], np.int32), SamplingParams(max_new_tokens=999), seed=0)
    started: tuple[Started, ...] = (Started(request, 0),)
    told = []
    for left, token_id in zip(reversed(range(len(ids))), ids, strict=True):
        finish = Finish.NONE if left else Finish.LENGTH
        output = StepOutput(
            1, np.array([1]), np.array([token_id], np.int32), np.array([finish], np.uint8), started
        )
        started = ()
        told += [delta.text for delta in detokenizer.on_step(output).deltas]
    return told


def whole_characters(family: str, ids: list[int]) -> str:
    """The text of these ids up to the last character that is complete."""
    tokenizer = backend_of(family)
    if family in ("byte_level", "tiktoken", REAL):
        return str(tokenizer.decode(ids)).rstrip("�")
    # Of a run of bytes with half a character in it, this decoder replaces all.
    raw = b""
    for token in map(tokenizer.id_to_token, ids):
        is_byte = token.startswith("<0x")
        raw += bytes([int(token[3:5], 16)]) if is_byte else token.replace("▁", " ").encode()
    text = raw.decode(errors="ignore")
    return text.removeprefix(" ") if family == "byte_fallback" else text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_the_deltas_are_the_decoding(family: str, text: str) -> None:
    """vllm#8627, TGI#333: each character whole, as soon as its last token has come."""
    tokenizer = backend_of(family)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    told = texts_by_id(family, ids)
    assert "".join(told) == tokenizer.decode(ids)
    assert "�" not in "".join(told)
    for count, so_far in enumerate(itertools.accumulate(told), 1):
        assert so_far == whole_characters(family, ids[:count]), "late, or too early"


@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_several_tokens_hold_back_the_last_character_alone(
    family: str, size: int
) -> None:
    """dynamo#12630: complete characters go out, though the chunk ends within another."""
    tokenizer = backend_of(family)
    ids = tokenizer.encode("".join(TEXTS), add_special_tokens=False).ids
    told = texts_by_id(family, ids)
    for end in range(size, len(ids), size):
        chunk = "".join(told[end - size : end])
        before = whole_characters(family, ids[: end - size])
        assert before + chunk == whole_characters(family, ids[:end])


@pytest.mark.parametrize("text", TEXTS)
def test_streams_through_the_server(server: ServerProcess, text: str) -> None:
    """vllm#8627, TGI#333, where every token is a byte."""
    chunks = chat_chunks(server, max_tokens=200, **forced(text))
    assert message_of(chunks) == ({"role": "assistant", "content": text}, "stop")
    assert not any("�" in c["delta"].get("content", "") for c in choices_of(chunks))
    whole = chat(server, max_tokens=200, **forced(text))["choices"][0]["message"]["content"]
    assert whole == text


@pytest.mark.parametrize("tokens", range(1, 8))
def test_a_character_that_is_cut_off(server: ServerProcess, tokens: int) -> None:
    """dynamo#12630: what was complete is told; the rest is U+FFFD, as it is in a decoding."""
    asked = {"max_tokens": tokens, **forced("天é气")}
    expected = "天é气".encode()[:tokens].decode(errors="replace")
    assert complete(server, **asked)["choices"][0]["text"] == expected
    assert text_of(completion_chunks(server, **asked)) == (expected, "length")
