"""Fixtures: one app over a scripted service, and a client that calls it in process."""

from collections.abc import AsyncIterator

import httpx
import pytest

from httpd.app import create_app
from httpd.settings import HttpSettings
from tests.fakes_service import FakeService

SETTINGS = HttpSettings(version="9.9", max_body_bytes=4096)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def service(anyio_backend: str) -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service, SETTINGS))
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        yield client
