"""Requests that have hurt other engines: each is refused, or changes nothing, with its CVE."""

from typing import Any

import httpx
import pytest

from tests.fakes_service import FakeService

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "org/tiny-model", "messages": SAID},
    TEXT: {"model": "org/tiny-model", "prompt": "x"},
}
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}

# (path, changed fields, the field that is named)
REFUSED = {
    "CVE-2024-8768 empty prompt": (TEXT, {"prompt": ""}, "prompt"),
    "CVE-2024-8768 empty list": (TEXT, {"prompt": []}, "prompt"),
    "CVE-2024-8939 best_of": (TEXT, {"best_of": 10**6}, "best_of"),
    "CVE-2026-34756 n": (CHAT, {"n": 10**6}, "n"),
    "CVE-2026-73559 prompts": (TEXT, {"prompt": ["x"] * 129}, "prompt"),
    "CVE-2026-73559 prompts times n": (TEXT, {"prompt": ["x"] * 2, "n": 65}, "n"),
    "CVE-2025-48942, CVE-2025-48944 a tool's schema": (
        CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        "tools[0].function.parameters",
    ),
    "CVE-2025-48943 a regex that is none": (
        CHAT, {"structured_outputs": {"regex": {}}}, "structured_outputs.regex",
    ),
    "CVE-2026-54235 temperature": (CHAT, {"temperature": 1e308}, "temperature"),
    "CVE-2025-61620 chat_template_kwargs": (
        CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize",
    ),
    "CVE-2025-62426 chat_template_kwargs": (
        CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs.chat_template",
    ),
    "CVE-2025-6242 image_url": (
        CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]",
    ),
    **{
        f"{cve} {kind}": (
            CHAT, {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]},
            "messages[0].content[0]",
        )
        for cve, kind in (
            ("CVE-2026-24779", "image_url"), ("CVE-2026-25960", "input_image"),
            ("CVE-2026-34753", "file"), ("CVE-2026-34755", "video_url"),
            ("CVE-2026-54233", "input_audio"), ("CVE-2026-55646", "audio_url"),
            ("CVE-2025-46722", "image_embeds"), ("CVE-2026-12491", "image_grid_thw"),
        )
    },
    "PYSEC-2026-4000 ids out of range": (TEXT, {"stop_token_ids": [100]}, "stop_token_ids[0]"),
}  # fmt: skip


@pytest.mark.parametrize("lesson", REFUSED)
async def test_refused(client: httpx.AsyncClient, service: FakeService, lesson: str) -> None:
    path, wrong, param = REFUSED[lesson]
    response = await client.post(path, json={**GOOD[path], **wrong})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert not service.submissions


# What would be code, a file, an address or an inner name to other engines.
IGNORED: dict[str, Any] = {
    "CVE-2025-62164 prompt_embeds": {"prompt_embeds": "gASVAAAA"},
    "CVE-2026-7304 logit processor": {"custom_logit_processor": '{"callable": "80049500"}'},
    "CVE-2026-94626 kv_transfer_params": {"kv_transfer_params": {"tp_size": 0, "host": "evil"}},
    "CVE-2026-115912 shared memory": {"mm_handle": {"shm_name": "psm_1"}, "bootstrap_host": "evil"},
    "CVE-2026-10300 lora_path": {"lora_path": "/etc/passwd"},
    "CVE-2025-61620 chat_template": {"chat_template": "{{ ''.__class__.__mro__ }}"},
}


@pytest.mark.parametrize("lesson", IGNORED)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_not_looked_at(
    client: httpx.AsyncClient, service: FakeService, lesson: str, path: str
) -> None:
    """What reaches the engine is the same with the field as without."""
    plain = await client.post(path, json=GOOD[path])
    response = await client.post(path, json={**GOOD[path], **IGNORED[lesson]})
    assert plain.status_code == 200 and response.status_code in (200, 400)
    assert all(made == service.submissions[0] for made in service.submissions)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
async def test_numbers_that_are_none(
    client: httpx.AsyncClient, service: FakeService, number: str, field: str
) -> None:
    """CVE-2026-54235."""
    content = f'{{"model":"org/tiny-model","prompt":"x","{field}":{number}}}'
    assert (await client.post(TEXT, content=content)).status_code == 400
    assert not service.submissions


@pytest.mark.parametrize(
    "path",
    ["/docs", "/openapi.json", "/static/../x", "/derender", "/load_lora_adapter",
     "/update_weights_from_tensor", "/v1/load_lora_adapter", "/load_lora_adapter_from_tensors",
     "/collective_rpc", "/start_profile"],
)  # fmt: skip
async def test_no_route_but_those_that_are_meant(client: httpx.AsyncClient, path: str) -> None:
    """CVE-2025-10164, CVE-2026-15969, CVE-2026-71486, CVE-2026-86793: what is not served cannot be
    attacked.
    """
    response = await client.post(path, json={})
    assert response.status_code in (404, 405)


@pytest.mark.parametrize("method", ["__class__", "_answer", "DISPATCH", "get_response", "TRACE"])
async def test_a_method_is_no_attribute(client: httpx.AsyncClient, method: str) -> None:
    """CVE-2026-48817."""
    assert (await client.request(method, CHAT)).status_code == 405


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", 2.5), ("top_p", -0.1), ("top_k", 2**31), ("min_p", 2), ("seed", 2**63),
    ("stop_token_ids", [100]), ("allowed_token_ids", [100]), ("logit_bias", {"100": 1}),
    ("bad_words", ["x" * 65]), ("presence_penalty", 3), ("repetition_penalty", 0),
    ("min_tokens", 1 << 40), ("cache_salt", "x" * 257), ("priority", 1 << 40),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
async def test_no_endpoint_is_a_way_around_a_limit(
    client: httpx.AsyncClient, service: FakeService, name: str, value: Any
) -> None:
    """PYSEC-2026-4350: one validator for all."""
    bodies = {
        **GOOD,
        "/v1/responses": {"model": "org/tiny-model", "input": "x"},
        "/v1/messages": {"model": "org/tiny-model", "messages": SAID, "max_tokens": 9},
    }
    for path, body in bodies.items():
        response = await client.post(path, json={**body, name: value})
        assert response.status_code == 400, path
        assert f"'{name}" in response.json()["error"]["message"], path
    assert not service.submissions
