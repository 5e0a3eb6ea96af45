"""Where a server listens: its socket, before anything is served on it."""

import errno
import resource
import socket
from typing import Final

import click

from runtime.config import ServerConfig

_HERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_BACKLOG: Final = 4096
# Connections inherit these: a client whose machine went without a word is found out in 2 minutes.
_SOCKET_OPTIONS: Final = (
    ((socket.SOL_SOCKET, socket.SO_REUSEADDR), 1),
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 60),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 15),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 4),
)


def allow_many_files() -> None:
    """A connection is a file, and the usual limit of 1024 is fewer than the clients of a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket: connections wait in its queue until an HTTP loop takes them.

    Raises click.ClickException where the address cannot be had.
    """
    listening: socket.socket | None = None
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        for option, value in _SOCKET_OPTIONS:
            listening.setsockopt(*option, value)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        hint = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}{hint}"
        ) from error
    return listening


def address_of(config: ServerConfig, listening: socket.socket) -> str:
    """The URL that clients on this machine take, with the port that was found."""
    scheme = "http" if config.tls_cert is None else "https"
    host = _HERE.get(config.host, config.host)  # nobody can call "every address"
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"
