"""Parsing as pure functions: whatever the bytes, the outcome is a call or a refusal."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.request import ChatPrompt
from httpd.app import create_app
from httpd.chat import parse_chat
from httpd.completions import parse_completion
from httpd.errors import error_body, error_response
from httpd.fields import IGNORED, NEUTRAL, ChatFields, CompletionFields, unknown_fields
from httpd.service import Rejected
from httpd.settings import HttpSettings
from httpd.strict_json import parse_object
from httpd.text import json_bytes, shown, well_formed
from tests.fakes_service import CARD, FakeService

NAMES = sorted({*ChatFields.model_fields, *CompletionFields.model_fields, *NEUTRAL, *IGNORED})
PARTS = ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id"]
WORDS = ["user", "assistant", "tool", "text", "function", "org/tiny-model", "{}", "\ud800", ""]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(WORDS)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(PARTS) | st.text(), inner, max_size=5)
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text(), values, max_size=6)


def outcome(parse: Any, body: bytes) -> None:
    try:
        call = parse(body, CARD)
    except Rejected as error:
        assert error.status in (400, 404)
        assert error.message and len(error.message) < 1000
        assert error_response(error).body == json_bytes(error_body(error))
    else:
        assert call.jobs and call.params
        for params in call.params:
            assert params.max_new_tokens > 0 or params.echo
            assert 0 <= params.temperature <= 2 and 0 < params.top_p <= 1
        for job in call.jobs:
            prompt = job.prompt
            json.dumps(prompt.messages if isinstance(prompt, ChatPrompt) else 0).encode()


@given(bodies)
@example({"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]})
def test_any_object_is_a_call_or_a_refusal(body: dict[str, Any]) -> None:
    for with_model in ({}, {"model": CARD.id}):
        raw = json.dumps({**body, **with_model}).encode()
        outcome(parse_chat, raw)
        outcome(parse_completion, raw)
    messages = {"model": CARD.id, "messages": list(body.values())}
    outcome(parse_chat, json.dumps(messages).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_or_a_refusal(body: bytes) -> None:
    outcome(parse_chat, body)


pieces = st.sampled_from(
    ["\\\\", "\\n", "\\u00e9", "\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\ue000", "u", "d83d", "é"]
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_surrogates_are_paired_or_replaced(literal: str) -> None:
    got = parse_object(f'{{"{literal}": "{literal}"}}'.encode())
    expected = well_formed(json.loads(f'"{literal}"'))
    assert got == {expected: expected}


@given(st.text(st.characters(codec=None) | st.sampled_from(["\ud83d", "\ude00"])))
def test_well_formed(text: str) -> None:
    fixed = well_formed(text)
    fixed.encode()
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    assert fixed == re.sub("[\ud800-\udfff]", "\ufffd", paired)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":', b'{"messages":[['])
def test_depth_bombs(opening: bytes) -> None:
    with pytest.raises(Rejected, match="recursion limit") as refused:
        parse_object(b'{"a":' + opening * 200_000)
    assert refused.value.status == 400


def test_shown_is_short_and_printable() -> None:
    for value in (
        "a\n\x1b[31m\u202e" * 50,
        10**5000,
        -(2**4000),
        [1] * 999,
        {"a": 1},
        "\udc80",
        0.1,
    ):
        told = shown(value)
        assert len(told) < 400 and told.replace("…", "").isascii() and told.isprintable()


@pytest.mark.anyio
async def test_large_bodies_are_parsed_beside_the_loop() -> None:
    service = FakeService()
    transport = httpx.ASGITransport(create_app(service, HttpSettings(version="9")))
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        good = {"model": CARD.id, "prompt": "x" * 200_000}
        bad = {"model": CARD.id, "prompt": [1] * 100_000 + [-7]}
        first, second = await asyncio.gather(
            client.post("/v1/completions", json=good), client.post("/v1/completions", json=bad)
        )
    assert first.status_code == 200
    assert second.status_code == 400 and "-7" in second.json()["error"]["message"]
    assert len(service.submissions) == 1


def test_what_is_kept_of_unknown_names_is_little() -> None:
    body = {f"{'x' * 1000}{i}": 1 for i in range(1000)}
    names = unknown_fields(ChatFields, body)
    assert 0 < len(names) <= 100
    assert max(map(len, names)) < 100
