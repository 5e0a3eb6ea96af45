"""Everything an operator can set, checked once and frozen."""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.config import EngineConfig
from httpd.auth import Access, Keyring
from httpd.parsing.formats import REASONING_CHOICES, TOOLS_CHOICES
from runtime.gil import is_gil_enabled
from runtime.logs import FORMATS

MIB: Final = 1 << 20
CACHE_ISOLATIONS: Final = ("none", "key")


def usual_http_loops(processors: int, gil: bool) -> int:
    """One for four processors, four at most: the engine, tokenizers and others need the rest.

    On 16 processors one loop carries 21,000 tokens a second over HTTP/1.1, four 50,000
    (perf/results/bench_frontend_loops.json); with a GIL all of them share one processor.
    """
    return 1 if gil else max(1, min(4, processors // 4))


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A server's settings; validated in `__post_init__`, never edited afterwards.

    Raises ValueError naming the field, its value and the limit.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    served_model_name: str | None = None  # None: the name of the checkpoint's folder
    tool_call_parser: str = "auto"  # how the model writes calls; auto: as its chat template says
    reasoning_parser: str = "auto"
    # Each with a thread and connections of its own.
    http_loops: int = usual_http_loops(len(os.sched_getaffinity(0)), is_gil_enabled())
    tokenizer_threads: int = 2  # templates and encoding are a small part of a request's work
    max_queued: int = 2048  # requests beyond the running ones, before clients are told to wait
    max_queued_tokens: int = 1 << 22  # of their prompts: 2,048 for each of the queue's places
    max_choices: int = 128  # prompts times `n` of one request
    max_body_bytes: int = 10 * MIB
    max_streams: int = 1024  # HTTP/2 streams on one connection
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_keys: Keyring = Keyring()  # none: the API is open
    admin_keys: Keyring = Keyring()  # none: see `access`
    cache_isolation: str = "none"  # none: keys share prefixes; key: each has its own
    page: bool = True  # the web page at /
    access_log: bool = False
    log_format: str = "human"
    otlp_endpoint: str | None = None  # where spans are posted to; None: see telemetry/settings.py
    profile: int = 0  # steps that torch's profiler traces; 0: none
    profile_dir: Path = Path()  # where the trace goes
    request_timeout_s: float | None = None  # from its headers to the end of its answer
    stall_timeout_s: float = 60.0  # a client that takes nothing of its answer so long is cut
    drain_timeout_s: float = 30.0  # for running requests to end after SIGTERM
    watchdog_s: float = 300.0  # silence of a thread that has become a hang

    def __post_init__(self) -> None:
        self._among("tool_call_parser", self.tool_call_parser, TOOLS_CHOICES)
        self._among("reasoning_parser", self.reasoning_parser, REASONING_CHOICES)
        self._among("cache_isolation", self.cache_isolation, CACHE_ISOLATIONS)
        if self.cache_isolation == "key" and not self.api_keys:
            raise ValueError("cache_isolation is 'key', but there are no API keys to tell apart")
        self._among("log_format", self.log_format, FORMATS)
        self._within("profile", self.profile, 0, 100_000)
        if self.profile and not self.profile_dir.is_dir():
            raise ValueError(f"profile_dir is {self.profile_dir}; there is no such folder")
        self._within("port", self.port, 0, 65_535)
        self._within("http_loops", self.http_loops, 1, 64)
        self._within("tokenizer_threads", self.tokenizer_threads, 1, 64)
        self._within("max_queued", self.max_queued, 1, 1 << 20)
        self._within("max_queued_tokens", self.max_queued_tokens, 1, 1 << 40)
        self._within("max_choices", self.max_choices, 1, 1 << 16)
        self._within("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        self._within("max_streams", self.max_streams, 1, 1 << 20)
        if self.request_timeout_s is not None:
            self._within("request_timeout_s", self.request_timeout_s, 0.1, 604_800)
        self._within("stall_timeout_s", self.stall_timeout_s, 0.1, 86_400)
        self._within("drain_timeout_s", self.drain_timeout_s, 0, 86_400)
        self._within("watchdog_s", self.watchdog_s, 1, 86_400)
        if self.served_model_name == "":
            raise ValueError("served_model_name is empty; it must have at least one character")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        for name in ("tls_cert", "tls_key"):
            file = getattr(self, name)
            if file is not None and not file.is_file():
                raise ValueError(f"{name} is {file}; there is no such file")

    @property
    def max_requests(self) -> int:
        """Requests alive at the same time, from submission to their last word."""
        return self.engine.max_running + self.max_queued

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.engine.model.resolve().name

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name, of which nobody knows what it will be resolved to

    @property
    def access(self) -> Access:
        """Who may do what; without any keys, whoever is on this machine is an admin."""
        is_open = not self.api_keys and not self.admin_keys and self.is_local
        return Access(self.api_keys, self.admin_keys, is_admin_open=is_open)

    @staticmethod
    def _among(name: str, value: str, choices: Sequence[str]) -> None:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")

    @staticmethod
    def _within(name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
