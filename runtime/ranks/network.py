"""This machine's addresses and interfaces, as ranks of other machines reach them."""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from runtime.ranks.links import RanksError
from runtime.ranks.rank import LOOPBACK, Rank

RANK_HOST: Final = "PLAIT_RANK_HOST"
_SIOCGIFADDR: Final = 0x8915  # linux/sockios.h
_IPV6: Final = Path("/proc/net/if_inet6")


def host_of_rank_0(place: Rank, environ: Mapping[str, str] = os.environ) -> str:
    """The one address that rank 0, which asks, listens on; loopback where all ranks are here.

    Raises RanksError where the name given for it is unknown.
    """
    if place.store is None:
        return LOOPBACK
    asked, port = environ.get(RANK_HOST), place.store[1]
    try:
        if asked is None:
            return address_towards(place.store[0], port)
        return str(socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        name = place.store[0] if asked is None else f"{asked}, which {RANK_HOST} names,"
        raise RanksError(f"no address of rank 0 is found: {name} is unknown ({error})") from error


def address_towards(host: str, port: int = 9) -> str:
    """The address of this machine from which `host` is reached; no packet is sent.

    Raises OSError where there is no way.
    """
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(address)
        return str(asking.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """The name of the interface by which `host` is reached; None where it cannot be told."""
    own = ipaddress.ip_address(address_towards(host))
    if own.is_loopback:
        return "lo"
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if own in _addresses(name)), None)


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """An interface's first IPv4 address, and all others."""
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.append(ipaddress.IPv4Address(told[20:24]))
        except OSError:
            pass  # it has none
    lines = _IPV6.read_text().splitlines() if _IPV6.exists() else []
    for words in map(str.split, lines):
        if words[-1] == interface:
            found.append(ipaddress.IPv6Address(bytes.fromhex(words[0])))
    return found
