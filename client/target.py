"""Which server is asked, and how it is reached."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.request import getproxies, proxy_bypass

import httpx

from client.certificates import tls_for
from client.http1 import Http1Transport
from client.http2 import Http2Transport

KEY_VARIABLES: Final = ("PLAIT_API_KEY", "OPENAI_API_KEY")
_ASK_S: Final = 30.0  # for what a server answers at once


class NoServer(Exception):
    """Nobody answers there, or not as an OpenAI-compatible server; one line says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. The key is shown nowhere."""

    url: str  # without /v1
    model: str
    http2: bool = False
    key: str | None = field(default=None, repr=False)


def key_of_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """The API key to send: a flag would show it to everybody on the machine."""
    return next((environ[name] for name in KEY_VARIABLES if environ.get(name)), None)


def root_of(url: str) -> str:
    """The server's address as a client takes it, with or without the `/v1` that OpenAI's end in."""
    root = url.rstrip("/").removesuffix("/v1")
    return root if "://" in root else f"http://{root}"


def headers_of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def new_client(target: Target) -> httpx.AsyncClient:
    """A client without limits of its own; over HTTP/2 all requests share a connection."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=target.url, transport=_transport_to(target), limits=limits, timeout=None,
        verify=tls_for(target.url), headers=headers_of(target.key),
    )  # fmt: skip


def _transport_to(target: Target) -> httpx.AsyncBaseTransport | None:
    """None: httpx's own, which knows the proxies that the environment names."""
    if target.http2:
        return Http2Transport()
    url = httpx.URL(target.url)
    proxies = getproxies()
    if (url.scheme in proxies or "all" in proxies) and not proxy_bypass(url.host):
        return None
    return Http1Transport()


def ask_json(url: str, path: str, key: str | None) -> Any:
    """What a GET answers. Raises NoServer."""
    try:
        return _ask(url, path, key).json()
    except ValueError as error:
        raise NoServer(f"{url}{path} answers something that is no JSON") from error


def ask_text(url: str, path: str, key: str | None) -> str:
    """What a GET answers. Raises NoServer."""
    return _ask(url, path, key).text


def _ask(url: str, path: str, key: str | None) -> httpx.Response:
    try:
        answer = httpx.get(
            f"{url}{path}", headers=headers_of(key), timeout=_ASK_S, verify=tls_for(url)
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoServer(f"{url} does not answer: {error}") from error
    if answer.status_code == 401:
        wanted = "an API key" if key is None else "another API key"
        raise NoServer(f"{url} wants {wanted}: set {' or '.join(KEY_VARIABLES)}")
    if answer.status_code != 200:
        raise NoServer(f"{url}{path} answers {answer.status_code}: {answer.text[:300]}")
    return answer


def model_of(url: str, key: str | None = None) -> str:
    """The name of a server's first model. Raises NoServer."""
    told = ask_json(url, "/v1/models", key)
    try:
        return str(told["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise NoServer(f"{url}/v1/models lists no model") from error
