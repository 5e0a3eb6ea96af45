"""Log-probabilities: vllm#3707, #4795, #5008, #3179, #17637, #2703; sglang#5761.

Also tests/engine/test_special_rows.py, over both executors, and tests/http/test_choices.py.
"""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.text_decoder import TextDecoders
from tests.cases.asking import (
    CHAT,
    COMPLETIONS,
    Json,
    chat,
    chat_body,
    chat_chunks,
    choices_of,
    complete,
    completion_body,
    completion_chunks,
    forced,
    refusal,
    schema,
)
from tests.checkpoints import EOS, SPECIAL_TOKENS, reference_model
from tests.server_process import ServerProcess

NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TOLERANCE = 1e-4  # float32 on both sides; most of it is the order of sums over 48 to 80 numbers


@pytest.fixture(scope="module")
def reference(case_folder: Path) -> torch.nn.Module:
    return reference_model(case_folder)


def logprobs_after(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] float64: of what follows each id, by transformers."""
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def written(token_id: int, backend: Tokenizer) -> str:
    """A token as a completion's `logprobs` name it: one that is no character by its byte."""
    utf8 = TextDecoders(backend).utf8_of(token_id)
    return utf8.decode() if utf8.isascii() else f"bytes:\\x{utf8.hex()}"


def joined(chunks: list[Json]) -> Json:
    """The four lists of a completion's stream."""
    pieces = [choice["logprobs"] for choice in choices_of(chunks) if choice["logprobs"]]
    return {name: [each for piece in pieces for each in piece[name]] for name in NAMES}


def test_zero_and_no_alternatives(server: ServerProcess) -> None:
    """vllm#3707, #4795, #5008, #3179: the token's own are told, in each endpoint's form."""
    told = complete(server, logprobs=0)["choices"][0]
    assert len(told["logprobs"]["token_logprobs"]) == 8
    assert all(value < 0 for value in told["logprobs"]["token_logprobs"])
    assert told["logprobs"]["top_logprobs"] == [None] * 8
    assert joined(completion_chunks(server, logprobs=0))["tokens"] == told["logprobs"]["tokens"]
    forms: list[Json] = [{}, {"top_logprobs": 0}, {"top_logprobs": None}]
    for number, form in enumerate(forms):
        more = {"logprobs": True, **form}
        whole = chat(server, cache_salt=f"whole {number}", **more)["choices"][0]
        content = whole["logprobs"]["content"]
        assert len(content) == 8
        for one in content:
            assert set(one) == {"token", "logprob", "bytes", "top_logprobs"}
            assert one["logprob"] < 0 and one["top_logprobs"] == []
            assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
        # Computed as the whole answer was: a prompt from the cache may change the last bits.
        streamed = choices_of(chat_chunks(server, cache_salt=f"stream {number}", **more))
        pieces = [choice["logprobs"]["content"] for choice in streamed if choice["logprobs"]]
        assert sum(pieces, []) == content
    assert chat(server, logprobs=False)["choices"][0]["logprobs"] is None
    refusal(server.post(CHAT, chat_body(top_logprobs=2)), "top_logprobs")


@pytest.mark.parametrize("temperature", [0, 0.3, 2])
def test_they_are_of_the_models_own_distribution(
    server: ServerProcess, backend: Tokenizer, reference: torch.nn.Module, temperature: float
) -> None:
    """sglang#5761: whatever chooses the token; here as transformers has them."""
    text = "ask me"
    more: Json = {"frequency_penalty": 1.0, "logit_bias": {"87": 2}, "seed": 4, "ignore_eos": True}
    asked = {"temperature": temperature, "logprobs": 5, **more}
    told = complete(server, text, echo=True, **asked)["choices"][0]["logprobs"]
    ids = backend.encode(text).ids
    for at in range(len(ids), len(told["tokens"])):
        after = logprobs_after(reference, ids)[-1]
        best = after.topk(5)
        # Ids that the tokenizer lacks share an empty text: of them the likeliest is told.
        assert max(told["top_logprobs"][at].values()) == pytest.approx(
            float(best.values[0]), abs=TOLERANCE
        )
        own = told["token_logprobs"][at]
        as_likely = ((after - own).abs() < TOLERANCE).nonzero().flatten().tolist()
        named = [one for one in as_likely if written(one, backend) == told["tokens"][at]]
        assert len(named) == 1, (own, told["tokens"][at])
        assert math.fsum(map(math.exp, told["top_logprobs"][at].values())) <= 1 + TOLERANCE
        ids += named


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_is_scored(
    server: ServerProcess, backend: Tokenizer, reference: torch.nn.Module, k: int, stream: bool
) -> None:
    """vllm#2703, and max_tokens 0 as lm-eval asks: each number as transformers has it.

    The prompt is longer than a prefill chunk, and asked for twice: the cache must not cut it.
    """
    text = "A prompt of several pages and more than one chunk, asked for twice. " * 2
    ids = backend.encode(text).ids
    want = logprobs_after(reference, ids)[:-1]
    for max_tokens in (0, 4):
        asked: Json = {"echo": True, "logprobs": k, "max_tokens": max_tokens}
        if stream:
            first, *_ = chunks = completion_chunks(server, text, **asked)
            assert first["choices"][0]["text"] == text
            assert first["choices"][0]["logprobs"]["token_logprobs"][0] is None
            told = joined(chunks)
        else:
            choice = complete(server, text, **asked)["choices"][0]
            assert choice["text"].startswith(text) and choice["finish_reason"] == "length"
            told = choice["logprobs"]
        assert {len(told[name]) for name in NAMES} == {len(ids) + max_tokens}
        assert told["tokens"][: len(ids)] == list(text)
        assert told["text_offset"][: len(ids)] == list(range(len(ids)))
        own = want[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own.tolist(), abs=TOLERANCE)
        for at in range(1, len(ids)):
            top = told["top_logprobs"][at]
            if not k:
                assert top is None
                continue
            best = float(want[at - 1].max())
            assert max(top.values()) == pytest.approx(best, abs=TOLERANCE)


def test_special_tokens_among_the_likeliest(server: ServerProcess) -> None:
    """vllm#17637: they have a text of their own here, though the answer's leaves them out."""
    asked = {"logprobs": True, "top_logprobs": 2, **schema({"properties": {}})}
    content = chat(server, **asked)["choices"][0]["logprobs"]["content"]
    assert content and all(len(one["top_logprobs"]) == 2 for one in content)
    ended = chat(server, logprobs=True, top_logprobs=20, **forced("ok"))["choices"][0]
    assert ended["message"]["content"] == "ok"
    assert [one["token"] for one in ended["logprobs"]["content"]] == ["o", "k"]
    ended = complete(server, logprobs=0, **forced("ok"))["choices"][0]
    assert ended["text"] == "ok"
    assert ended["logprobs"]["tokens"] == ["o", "k", SPECIAL_TOKENS[EOS - 256]]
    prompt = "".join(map(chr, range(32, 127)))
    scored = complete(server, prompt, echo=True, logprobs=20, max_tokens=0)["choices"][0]
    seen = {name for top in scored["logprobs"]["top_logprobs"][1:] for name in top}
    assert seen & set(SPECIAL_TOKENS)


def test_none_are_computed_that_nobody_is_told(server: ServerProcess) -> None:
    """vllm#3179: a field that an endpoint cannot answer is refused, rather than ignored."""
    for path, body in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
        asked = body(prompt_logprobs=1, stream=True)
        refusal(server.post(path, asked), "prompt_logprobs")


def test_a_prompts_own_are_told_by_id(
    server: ServerProcess, backend: Tokenizer, reference: torch.nn.Module
) -> None:
    """In vLLM's form: each number as transformers has it."""
    text = "A prompt, scored. "
    ids = backend.encode(text).ids
    want = logprobs_after(reference, ids)
    first, *others = complete(server, text, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for at, told in enumerate(others):
        best = want[at].topk(2).indices.tolist()
        assert list(map(int, told)) == list(dict.fromkeys([*best, ids[at + 1]]))
        for token_id, one in told.items():
            own = want[at][int(token_id)]
            assert one["logprob"] == pytest.approx(float(own), abs=TOLERANCE)
            assert one["rank"] == 1 + int((want[at] > own).sum())
    of_chat = chat(server, text, prompt_logprobs=0)["prompt_logprobs"]
    assert of_chat[0] is None and all(len(one) == 1 for one in of_chat[1:])


def test_a_stop_string_is_not_told_by_its_tokens(server: ServerProcess) -> None:
    """A chat's are the tokens of its content, streamed or not; a completion's of its text."""
    more = {"logprobs": True, "stop": ["lo wo"], **forced("hello world")}
    whole = chat(server, **more)["choices"][0]
    assert whole["message"]["content"] == "hel"
    told = [one["token"] for one in whole["logprobs"]["content"]]
    streamed = choices_of(chat_chunks(server, **more))
    pieces = [choice["logprobs"]["content"] for choice in streamed if choice["logprobs"]]
    assert [one["token"] for one in sum(pieces, [])] == told == ["h", "e", "l"]
    more = {"logprobs": 0, "stop": ["lo wo"], **forced("hello world")}
    assert complete(server, **more)["choices"][0]["logprobs"]["tokens"] == ["h", "e", "l"]
