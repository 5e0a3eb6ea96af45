"""A server for this process alone, on threads of its own: what `plait chat --model` talks to.

It listens on a free port of this machine, behind a key that nobody else has.
"""

import logging
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from client.target import Target
from engine.config import EngineConfig
from httpd.auth import Keyring
from runtime.address import address_of, listen
from runtime.config import ServerConfig
from runtime.report import LoadingReport
from runtime.serve import load_real
from runtime.server import Server
from runtime.version import plait_version

_TICK_S: Final = 0.1
_DRAIN_S: Final = 1.0  # its one client has gone


class ServerFailed(Exception):
    """The model could not be loaded, or the server ended; the log says why."""


@contextmanager
def private_server(engine: EngineConfig) -> Iterator[Target]:
    """Loads the model and serves it until the end of the block. Raises ServerFailed."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    key = secrets.token_urlsafe(32)
    config = ServerConfig(engine, port=0, api_keys=Keyring.of([key]), drain_timeout_s=_DRAIN_S)
    listening = listen(config)
    target = Target(address_of(config, listening), config.model_name, key=key)
    report, ready = LoadingReport(), threading.Event()
    server = Server(
        config, listening, load_real(config), version=plait_version(), progress=report,
        on_ready=lambda _facts: ready.set(),
    )  # fmt: skip
    thread = threading.Thread(target=server.run, name="private-server")
    thread.start()
    try:
        while not ready.wait(_TICK_S):
            if not thread.is_alive():
                raise ServerFailed("the model could not be served")
        report.finish()
        yield target
    finally:
        server.on_signal(signal.SIGTERM)
        thread.join()
