"""The limits and habits of the HTTP interface, fixed before the app is built."""

from dataclasses import dataclass

from httpd.auth import Access

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What an operator may change. Built once by `runtime`, never edited afterwards."""

    version: str
    max_body_bytes: int = 10 * MIB
    body_timeout_s: float = 60.0  # to send the whole request body
    request_timeout_s: float | None = None  # from its headers to the end of its answer
    max_choices: int = 128  # prompts times `n` of one request
    ping_interval_s: float = 15.0  # of silence, then an SSE comment keeps proxies from closing
    cors_origins: tuple[str, ...] = ()  # none: no CORS headers at all
    isolates_keys: bool = False  # who calls with one key shares no prefixes with others
    has_page: bool = True  # the web page at /
    access: Access = Access()  # no keys: the API is open, and nobody is an admin
