"""Numbers that are none, penalties, seeds and minimal lengths: sglang#28153, #40076; Rapid-MLX#740;
vllm#16529, #6866, #11898, #10852, #15967, #15041; TGI#1765.

Also tests/engine/test_special_rows.py and tests/kernels/test_logit_rules.py, against plain
arithmetic, and tests/http/test_bad_input.py.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.asking import (
    CHAT,
    COMPLETIONS,
    Json,
    at_once,
    chat,
    chat_body,
    complete,
    complete_text,
    completion_body,
    forced,
    json_of,
    refusal,
    schema,
)
from tests.cases.conftest import FLAGS
from tests.checkpoints import EOS
from tests.server_process import SOON_S, ServerProcess, serving_model

X = 87  # the id of "x": the characters of a byte-level alphabet in their order


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "field", ['"temperature":{}', '"top_p":{}', '"min_p":{}', '"presence_penalty":{}',
              '"repetition_penalty":{}', '"logit_bias":{{"1":{}}}', '"max_tokens":{}', '"seed":{}']
)  # fmt: skip
def test_numbers_that_are_none(server: ServerProcess, field: str, literal: str) -> None:
    """sglang#28153, Rapid-MLX#740: refused by a body that strict parsers can read."""
    body = f'{{"model":"tiny","prompt":"x",{field.format(literal)}}}'
    response = httpx.post(f"{server.url}{COMPLETIONS}", content=body, verify=False)
    json_of(response)
    refusal(response)


@pytest.mark.parametrize("token_id", ["272", "191222", "-1", "99999999999999999999", "x", "1.0"])
def test_biases_out_of_the_vocabulary(server: ServerProcess, token_id: str) -> None:
    """vllm#16529, #6866."""
    for path, body in [
        (CHAT, chat_body(logit_bias={token_id: -100})),
        (COMPLETIONS, completion_body(logit_bias={token_id: -100})),
    ]:
        refusal(server.post(path, body), "logit_bias")
    assert complete(server, logit_bias={"271": -100})["choices"]


@pytest.mark.parametrize("count", [21, 1_000_000, -1, 2**63, True, 1.5])
def test_top_logprobs_beyond_measure(server: ServerProcess, count: Any) -> None:
    """sglang#40076."""
    asked = chat_body(logprobs=True, top_logprobs=count)
    refusal(server.post(CHAT, asked), "top_logprobs")
    refusal(server.post(COMPLETIONS, completion_body(logprobs=count)), "logprobs")


def texts(told: Json) -> list[str]:
    return [choice["text"] for choice in told["choices"]]


@pytest.mark.parametrize("prompt", ["a", "a prompt of more than one page of sixteen tokens"])
def test_choices_differ_and_come_again(server: ServerProcess, prompt: str) -> None:
    """vllm#11898, #10852: each has a seed of its own, which the client's and its index give."""
    asked: Json = {"n": 3, "seed": 1, "temperature": 1, "max_tokens": 16}
    first = texts(complete(server, prompt, **asked))
    assert len(set(first)) == 3
    assert texts(complete(server, prompt, **asked)) == first
    assert texts(complete(server, prompt, **{**asked, "n": 2})) == first[:2]
    assert texts(complete(server, prompt, **{**asked, "seed": 2})) != first
    greedy = texts(complete(server, prompt, **{**asked, "temperature": 0}))
    assert len(set(greedy)) == 1


SEEDED: list[Json] = [
    {"prompt": f"number {seed}", "seed": seed, "temperature": 1.2, "max_tokens": 24, **more}
    for seed, more in enumerate((
        {}, {"n": 3}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}, {"frequency_penalty": 1.0},
        {"structured_outputs": {"regex": "[a-f]{24}"}},
    ), -(2**63))
]  # fmt: skip


def test_seeds_outlive_their_server(server: ServerProcess, case_folder: Path) -> None:
    """vllm#11898: alone, among others, and from another process; without a seed never again."""
    alone = [texts(complete(server, **each)) for each in SEEDED]
    unseeded: Json = {**SEEDED[0], "seed": None}
    once = texts(complete(server, **unseeded))
    with serving_model(case_folder, *FLAGS) as other:
        other.ready()
        assert texts(complete(other, **unseeded)) != once
        told = at_once([partial(complete, other, **each) for each in reversed(SEEDED)])
        assert [texts(each) for each in reversed(told)] == alone
        other.end_clean()


def test_nothing_ends_an_answer_before_its_minimal_length(server: ServerProcess) -> None:
    """vllm#15967: neither EOS, nor a stop token, nor a stop string."""
    always_ends: Json = {"min_tokens": 20, "max_tokens": 30, "logit_bias": {str(EOS): 100}}
    for more in ({}, {"stop_token_ids": [EOS]}, {"ignore_eos": True, "stop_token_ids": [EOS]}):
        told = chat(server, "Say ok.", **always_ends, **more)
        assert told["choices"][0]["finish_reason"] == "stop"
        assert told["usage"]["completion_tokens"] == 21  # the EOS is the first beyond
    says_x: Json = {"min_tokens": 5, "max_tokens": 30, "logit_bias": {str(X): 100}}
    by_text = complete(server, stop=["x"], **says_x)
    assert by_text["choices"][0]["text"] == "xxxxx"
    assert by_text["usage"]["completion_tokens"] == 6
    by_id = complete(server, stop_token_ids=[X], **says_x)
    assert "x" not in by_id["choices"][0]["text"]
    assert by_id["usage"]["completion_tokens"] == 6
    refusal(server.post(CHAT, chat_body(min_tokens=9)), "min_tokens")


PLAIN: Json = {"prompt": "a neighbour", "max_tokens": 40, "ignore_eos": True}
NEIGHBOURS: dict[str, Json] = {
    "penalties": {"frequency_penalty": 1.05, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    "sampled": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    "bias": {"logit_bias": {str(X): 100, "30": -100}},
    "allowed": {"allowed_token_ids": [40, 41, 42], "min_tokens": 5},
    "logprobs": {"logprobs": 5, "echo": True},
    "grammar": schema({"type": "array", "items": {"type": "integer"}}),
    "choice": forced("a choice that takes a while to be made"),
    "three": {"n": 3, "seed": 1, "temperature": 1, "frequency_penalty": 0.5},
}


def told_of(server: ServerProcess, more: Json) -> list[tuple[str, Any]]:
    """Text and token logprobs of each choice."""
    choices = complete(server, **{**PLAIN, **more})["choices"]
    return [(one["text"], one["logprobs"] and one["logprobs"]["tokens"]) for one in choices]


def test_no_neighbour_changes_an_answer(server: ServerProcess) -> None:
    """TGI#1765: all parameters side by side; each answer is what it is alone."""
    alone = {name: told_of(server, more) for name, more in NEIGHBOURS.items()}
    plain = told_of(server, {})
    assert [name for name, told in alone.items() if told == plain] == []
    assert alone["logprobs"][0][0] == PLAIN["prompt"] + plain[0][0]
    for _ in range(2):  # the second time with all prompts in the cache
        asked = [{}, *NEIGHBOURS.values(), {}]
        first, *others, last = at_once([partial(told_of, server, more) for more in asked])
        assert first == last == plain
        assert dict(zip(NEIGHBOURS, others, strict=True)) == alone


def test_a_clients_request_id_is_its_own_affair(server: ServerProcess) -> None:
    """vllm#15041: eight requests of one name at once, none of which harms another."""

    async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
        body = completion_body(f"number {number}", max_tokens=20, request_id="same")
        return await client.post(COMPLETIONS, json=body, headers={"x-request-id": "same"})

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=SOON_S, verify=False, trust_env=False
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(8)))

    responses = asyncio.run(main())
    assert {response.headers["x-request-id"] for response in responses} == {"same"}
    assert len({json_of(response)["id"] for response in responses}) == 8
    for number, response in enumerate(responses):
        (choice,) = json_of(response)["choices"]
        assert choice["text"] == complete_text(server, f"number {number}", max_tokens=20)


def test_bad_words_never_come(server: ServerProcess) -> None:
    """Not a report, but what vLLM's clients expect; a grammar that can go around one does."""
    words = ["ab", "ba", "c"]
    text = complete_text(
        server, bad_words=words, structured_outputs={"regex": "[abc]{12}"}, temperature=1, seed=3,
        max_tokens=20,
    )  # fmt: skip
    assert text in ("a" * 12, "b" * 12)


@pytest.mark.parametrize(
    "more",
    [
        {"bad_words": ["x"], **forced("xyz")},
        {"allowed_token_ids": [X], **forced("abc")},
        {"stop_token_ids": [X], **forced("xyz")},
        {"allowed_token_ids": [X], "bad_words": ["x"]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_contradicts_itself_at_once_is_refused(
    server: ServerProcess, more: Json, stream: bool
) -> None:
    """Before the first byte, streamed or not."""
    for path, body in [(CHAT, chat_body(stream=stream, **more)),
                       (COMPLETIONS, completion_body(stream=stream, **more))]:  # fmt: skip
        assert refusal(server.post(path, body))["code"] == "unsatisfiable"


@pytest.mark.parametrize(
    "more",
    [
        {"bad_words": ["yz"], **forced("xyz")},
        {"allowed_token_ids": [X], **forced("xyz")},
        {"stop_token_ids": [X], **forced("yxz")},
    ],
)
def test_what_contradicts_itself_later_ends_alone(server: ServerProcess, more: Json) -> None:
    asked = [lambda: server.post(CHAT, chat_body(**more)), lambda: chat(server, **forced("hello"))]
    response, other = at_once(asked)
    error = refusal(response)
    assert error["code"] == "unsatisfiable"
    assert any(name in error["message"] for name in more)
    assert other["choices"][0]["message"]["content"] == "hello"
