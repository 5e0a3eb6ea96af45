"""The line of each request, whatever its client writes into it."""

import asyncio
import logging
from typing import Any

import pytest

from engine.config import EngineConfig
from runtime.config import ServerConfig
from runtime.http_thread import hypercorn_config


def line(caplog: pytest.LogCaptureFixture, path: str, agent: bytes) -> str:
    """What is logged of a request for `path`."""
    config = ServerConfig(EngineConfig("/nowhere"), access_log=True)  # type: ignore[arg-type]
    scope: Any = {
        "type": "http", "http_version": "1.1", "method": "GET", "path": path, "scheme": "http",
        "query_string": b"", "client": ("127.0.0.1", 5), "headers": [(b"user-agent", agent)],
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "hypercorn.access"):
        access = hypercorn_config(config).log.access
        asyncio.run(access(scope, {"status": 404, "headers": []}, 0.1))
    (record,) = caplog.records
    return record.getMessage()


def test_a_request_is_one_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    path = '/é\n12:00:00 CRITICAL it is over\r\x00\x1b[31m" \\ \u2028\x9b'
    said = line(caplog, path, b"curl\x1b]0;title\x07 \x85\xff")
    assert said.isprintable()
    assert (
        '"GET /é\\n12:00:00 CRITICAL it is over\\r\\x00\\x1b[31m\\" \\\\ \\u2028\\x9b 1.1"' in said
    )
    assert said.endswith('"-" "curl\\x1b]0;title\\x07 \\x85ÿ"')


def test_long_values_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    said = line(caplog, "/", b"a" * 16_000)
    assert said.endswith('aaa…"') and len(said) < 1200
