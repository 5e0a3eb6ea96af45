"""/tokenize and /detokenize, in vLLM's shapes."""

from typing import Any

import httpx
import pytest

from engine.request import ChatPrompt, TextPrompt
from httpd import tokens
from httpd.service import Rejected, State
from tests.fakes_service import FakeService, context_refusal

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "time"}}


async def test_a_prompt(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post("/tokenize", json={"model": "org/tiny-model", "prompt": "hi"})
    assert answer.json() == {
        "count": 3, "max_model_len": 64, "tokens": [7, 8, 9], "token_strs": None,
    }  # fmt: skip
    assert service.prompts == [TextPrompt("hi")]
    body = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True, "model": None}
    answer = await client.post("/tokenize", json=body)
    assert answer.json()["token_strs"] == ["t7", "t8", "t9"]
    assert service.prompts[1] == TextPrompt("hi", add_special_tokens=False)


async def test_messages(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {"messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": False}
    answer = await client.post("/tokenize", json=body)
    assert answer.json()["count"] == 3
    messages = ({"role": "user", "content": "hi"},)
    assert service.prompts == [ChatPrompt(messages, {"tools": [TOOL]}, opens_answer=False)]
    await client.post("/tokenize", json={"messages": MESSAGES})
    assert service.prompts[1] == ChatPrompt(messages)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "hi", "messages": MESSAGES}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1]}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"messages": MESSAGES, "tools": [{"type": "x"}]}, 400, "tools[0].type"),
        ({"prompt": "hi", "model": "other"}, 404, "model"),
        ({"messages": MESSAGES, "model": "other"}, 404, "model"),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, service: FakeService, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await client.post("/tokenize", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert service.prompts == []


async def test_ids_to_text(client: httpx.AsyncClient) -> None:
    answer = await client.post("/detokenize", json={"tokens": [1, 99]})
    assert answer.json() == {"prompt": "[1][99]"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "tokens"),
        ({"tokens": "1"}, 400, "tokens"),
        ({"tokens": [1, 100]}, 400, "tokens[1]"),
        ({"tokens": [-1]}, 400, "tokens[0]"),
        ({"tokens": [True]}, 400, "tokens[0]"),
        ({"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_refused_ids(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await client.post("/detokenize", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


async def test_ids_are_bounded() -> None:
    card = FakeService().card
    body = b'{"tokens": [' + b"1," * tokens.MAX_IDS + b"1]}"
    with pytest.raises(Rejected, match="at most"):
        tokens.parse_detokenize(body, card)


async def test_what_the_service_refuses(client: httpx.AsyncClient, service: FakeService) -> None:
    service.refusal = context_refusal()
    answer = await client.post("/tokenize", json={"prompt": "hi"})
    assert answer.status_code == 400
    service.current_state = State.LOADING
    assert (await client.post("/tokenize", json={"prompt": "hi"})).status_code == 503
