"""Whose certificates are believed: on this machine anybody's, elsewhere those of known authorities.

Where a key goes with each request, whoever answers must be who the address says. SSL_CERT_FILE
names authorities of one's own, as for every program that uses OpenSSL.
"""

import ipaddress
import ssl

import httpx


def tls_for(url: httpx.URL | str) -> ssl.SSLContext:
    """What a connection to `url` checks; without TLS it is not used."""
    if not _is_local(httpx.URL(url).host):
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, of which nobody knows what it will be resolved to
