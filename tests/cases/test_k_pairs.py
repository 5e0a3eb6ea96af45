"""Features of one request, two by two: CVE-2026-44223, where any penalty with one kind of decoding
ended a server. What each promises must hold beside every other.
"""

import itertools
import string
from collections.abc import Callable
from functools import partial

import pytest

from tests.cases.asking import Json, at_once, complete, completion_chunks, text_of
from tests.checkpoints import EOS, SPECIAL_TOKENS
from tests.server_process import ServerProcess

PROMPT = "two by two"
PLAIN: Json = {"max_tokens": 16, "cache_salt": "pairs"}


def id_of(char: str) -> int:
    """The id of a printable character: they are a byte-level alphabet's first, in their order."""
    return ord(char) - ord("!")


def spelled(tokens: list[str]) -> str:
    """The text of a completion's tokens, of which some are bytes of a character; without an EOS."""
    parts = [
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
        if token != SPECIAL_TOKENS[EOS - 256]
    ]
    return b"".join(parts).decode(errors="replace")


LETTERS = string.ascii_lowercase
Kept = Callable[[Json, str], bool]  # of a choice, and its generated text

FEATURES: dict[str, tuple[Json, Kept]] = {
    "penalties": (
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        lambda _choice, text: len(set(text)) > len(text) // 3,
    ),
    "sampled": (
        {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "seed": 3},
        lambda _choice, _text: True,
    ),
    "bias": ({"logit_bias": {str(id_of("c")): -100}}, lambda _choice, text: "c" not in text),
    "allowed": (
        {"allowed_token_ids": [*map(id_of, LETTERS), EOS]},  # or a grammar could not end
        lambda _choice, text: set(text) <= set(LETTERS),
    ),
    "bad words": (
        {"bad_words": ["ab", "ba", "d"]},
        lambda _choice, text: not any(word in text for word in ("ab", "ba", "d")),
    ),
    "stop": ({"stop": ["aa", "zz"]}, lambda _choice, text: "aa" not in text and "zz" not in text),
    "stop id": ({"stop_token_ids": [id_of("e")]}, lambda _choice, text: "e" not in text),
    "min tokens": ({"min_tokens": 4}, lambda _choice, text: len(text.encode()) >= 4),
    "ignore EOS": ({"ignore_eos": True}, lambda _choice, _text: True),
    "n": ({"n": 2}, lambda choice, _text: choice["index"] in (0, 1)),
    "logprobs": (
        {"logprobs": 2},
        lambda choice, text: (
            spelled(choice["logprobs"]["tokens"]).endswith(text)
            and all(len(each) in (2, 3) for each in choice["logprobs"]["top_logprobs"] if each)
        ),
    ),
    "prompt logprobs": (
        {"prompt_logprobs": 1},
        lambda choice, _text: len(choice["prompt_logprobs"]) == len(PROMPT),
    ),
    "echo": ({"echo": True}, lambda choice, _text: choice["text"].startswith(PROMPT)),
    "grammar": (
        {"structured_outputs": {"regex": "[a-e]{6,12}"}},
        lambda _choice, text: set(text) <= set("abcde"),
    ),
}
PAIRS = [*itertools.combinations(FEATURES, 2)]
STREAMED = [pair for pair in PAIRS if "prompt logprobs" not in pair]  # which streams do not have


def asked_by(pair: tuple[str, str]) -> Json:
    return {**PLAIN, **FEATURES[pair[0]][0], **FEATURES[pair[1]][0]}


@pytest.mark.parametrize("first", dict.fromkeys(pair[0] for pair in PAIRS))
def test_each_beside_every_other(server: ServerProcess, first: str) -> None:
    pairs = [pair for pair in PAIRS if pair[0] == first]
    told = at_once([partial(complete, server, PROMPT, **asked_by(pair)) for pair in pairs])
    for pair, whole in zip(pairs, told, strict=True):
        assert len(whole["choices"]) == (2 if "n" in pair else 1), pair
        for choice in whole["choices"]:
            text = choice["text"].removeprefix(PROMPT if "echo" in pair else "")
            for name in pair:
                assert FEATURES[name][1](choice, text), (pair, name, text)


@pytest.mark.parametrize("first", dict.fromkeys(pair[0] for pair in STREAMED))
def test_a_stream_says_the_same(server: ServerProcess, first: str) -> None:
    for pair in (pair for pair in STREAMED if pair[0] == first):
        whole = complete(server, PROMPT, **asked_by(pair))["choices"][0]
        streamed = text_of(completion_chunks(server, PROMPT, **asked_by(pair)))
        assert streamed == (whole["text"], whole["finish_reason"]), pair
