"""Names that clients make up, where a refusal repeats them: short and printable in any case."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from httpd.app import create_app
from tests.fakes_service import FakeService
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

MODEL = "org/tiny-model"
CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
SAID = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"},
    MESSAGES: {"messages": SAID, "max_tokens": 1},
}  # fmt: skip
# What a client may send as a name, and what is told of it.
NAMES = {
    "k" * 200_000: "k" * 48 + "…",
    "a\n\x00b": "a\\n\\u0000b",
    "\u202eevil": "\\u202eevil",
}
FIELDS: list[tuple[str, tuple[str, ...], Any]] = [
    ("logit_bias", (CHAT, TEXT, RESPONSES, MESSAGES), 101),
    ("chat_template_kwargs", (CHAT, RESPONSES), 1),
    ("structured_outputs", (CHAT, TEXT), 1),
    ("metadata", (RESPONSES,), 5),
]


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    """Its bodies may be large."""
    app = create_app(service, replace(SETTINGS, max_body_bytes=1 << 20))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        yield client


@pytest.mark.parametrize("name", NAMES, ids=["long", "control", "bidi"])
@pytest.mark.parametrize(("field", "paths", "value"), FIELDS, ids=[each[0] for each in FIELDS])
async def test_a_name_within_a_field(
    client: httpx.AsyncClient, service: FakeService, field: str, paths: tuple[str, ...], value: Any,
    name: str,
) -> None:  # fmt: skip
    for path in paths:
        body = {"model": MODEL, **GOOD[path], field: {name: value}}
        response = await client.post(path, json=body)
        assert response.status_code == 400, path
        error = response.json()["error"]
        assert f"'{field}.{NAMES[name]}" in error["message"]
        assert path == MESSAGES or error["param"].startswith(f"{field}.{NAMES[name]}")
        assert len(response.content) < 1000
    assert not service.submissions


async def test_a_name_at_the_top(client: httpx.AsyncClient) -> None:
    """Of a field that holds an infinity: whatever it is, the body is refused."""
    for name, told in NAMES.items():
        content = f'{{"model": "x", {json.dumps(name)}: [1e999]}}'
        response = await client.post(TEXT, content=content)
        assert (response.status_code, response.json()["error"]["param"]) == (400, told)


async def test_many_names(client: httpx.AsyncClient) -> None:
    names = {str(number): 1 for number in range(20_000)}
    body = {"model": MODEL, **GOOD[TEXT], "structured_outputs": names}
    response = await client.post(TEXT, json=body)
    assert response.status_code == 400 and len(response.content) < 1000
    assert "20000 fields" in response.json()["error"]["message"]
