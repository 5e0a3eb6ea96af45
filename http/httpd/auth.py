"""Who may call: API keys in front of every route, admin keys at the routes that need one.

Rules
- Where API keys are set, nothing passes without one but the paths in `PUBLIC_PATHS`, compared as a
  whole with `scope["path"]`: the probes, and the web page, which is the same bytes for everybody,
  holds nothing of this server, and asks for a key before it can ask for anything. Any path that is
  not exactly one of these is behind the keys, whatever a router would make of it; the Host header
  and the rest of the target decide nothing.
- An admin route asks for itself (`AdminOnly`), so that there is no list of paths to slip past.
- An admin key opens everything.
- Keys are looked at in full, all of them, by digests of one length: the time tells nothing.
- What a client sends as a key is repeated to nobody: neither in a body nor in the log.
"""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from httpd.errors import error_response
from httpd.service import Rejected

PUBLIC_PATHS: Final = frozenset({"/health", "/ready", "/"})

_CALLER: Final = "plait.caller"  # where a scope has what `caller_of` tells

# What a page in a browser, or a proxy, adds to requests that it did not make up itself.
_FORWARDED: Final = frozenset({b"origin", b"forwarded", b"via", b"x-forwarded-for"})


@dataclass(frozen=True, slots=True)
class Keyring:
    """Keys that open the same doors; only their digests. Safe from any thread."""

    digests: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> "Keyring":
        """The ring of these keys, in ASCII."""
        return cls(tuple(dict.fromkeys(sha256(key.encode("ascii")).digest() for key in keys)))

    def __len__(self) -> int:
        return len(self.digests)

    def opens(self, keys: Iterable[bytes]) -> bool:
        """Whether one of `keys` is on the ring."""
        return self.found(keys) is not None

    def found(self, keys: Iterable[bytes]) -> bytes | None:
        """The digest of the first of `keys` that is on the ring."""
        found: list[bytes] = []
        for key in keys:
            given = sha256(key).digest()
            matches = [hmac.compare_digest(digest, given) for digest in self.digests]
            found += [given] * any(matches)
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what. Built once by `runtime`, never edited afterwards."""

    api_keys: Keyring = Keyring()  # empty: the API is open
    admin_keys: Keyring = Keyring()  # empty: nobody is an admin, but see below
    is_admin_open: bool = False  # without any keys, to whoever calls directly


class KeyGuard:
    """ASGI middleware that lets nobody in without a key, where keys are set.

    Owned by its HTTP loop.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(_no_key(scope), scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Scope) -> bool:
        access = self._access
        if not access.api_keys or scope["path"] in PUBLIC_PATHS:
            return True
        keys = _keys_of(scope)
        by_api, by_admin = access.api_keys.found(keys), access.admin_keys.found(keys)
        caller = by_api or by_admin
        scope[_CALLER] = "" if caller is None else caller.hex()
        return caller is not None


def caller_of(scope: Scope) -> str:
    """Who calls: the digest of the key that opened the door, "" where none was asked for."""
    caller: str = scope.get(_CALLER, "")
    return caller


class AdminOnly:
    """An ASGI app for one route that needs an admin key. Owned by its HTTP loop."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope)
        if refused is None:
            await self.app(scope, receive, send)
        else:
            await _refuse(refused, scope, receive, send)

    def _refusal(self, scope: Scope) -> Rejected | None:
        access, keys = self._access, _keys_of(scope)
        if access.admin_keys.opens(keys):
            return None
        if access.admin_keys:
            return _not_an_admin() if access.api_keys.opens(keys) else _no_key(scope)
        if access.is_admin_open and not _FORWARDED.intersection(
            name for name, _ in _headers(scope)
        ):
            return None
        return _not_an_admin()


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return headers


def _keys_of(scope: Scope) -> list[bytes]:
    """What is given as a key: a bearer token, or Anthropic's header; none where one is doubled.

    Two headers of one name could be two keys for two servers that read them differently.
    """
    bearers = [value for name, value in _headers(scope) if name == b"authorization"]
    keys = [value.strip() for name, value in _headers(scope) if name == b"x-api-key"]
    if len(bearers) > 1 or len(keys) > 1:
        return []
    for value in bearers:
        scheme, _, key = value.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            keys.append(key.strip())
    return [key for key in keys if key]


def _no_key(scope: Scope) -> Rejected:
    wrong = "Incorrect API key provided." if _keys_of(scope) else "You did not provide an API key."
    message = f"{wrong} It goes into the header 'Authorization: Bearer KEY'."
    return Rejected(401, message, code="invalid_api_key")


def _not_an_admin() -> Rejected:
    message = "This needs an admin key of the server."
    return Rejected(403, message, type="permission_error", code="admin_key_required")


async def _refuse(refused: Rejected, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(refused, scope["path"])
    if refused.status == 401:
        response.headers["www-authenticate"] = "Bearer"  # RFC 9110, 11.6.1: a 401 must say how
    await response(scope, receive, send)
