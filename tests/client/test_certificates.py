"""A key goes to nobody who cannot show a certificate, but for servers on this machine."""

import ssl

import pytest

from client.certificates import tls_for


@pytest.mark.parametrize("url", ["https://127.0.0.1:8000", "https://[::1]", "https://localhost/v1"])
def test_a_server_on_this_machine_may_have_any_certificate(url: str) -> None:
    context = tls_for(url)
    assert context.verify_mode is ssl.CERT_NONE and not context.check_hostname


@pytest.mark.parametrize("url", ["https://192.168.0.1", "https://api.example.com", "https://127.a"])
def test_certificates_of_all_others_are_checked(url: str) -> None:
    context = tls_for(url)
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
