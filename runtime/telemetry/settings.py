"""Where spans go, by flag or by OpenTelemetry's own environment variables. Imports none of it.

The variables that say how they are sent (headers, certificates, time, compression, the service's
name, sampling) are read by the library itself.
"""

import importlib.util
import logging
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from runtime.telemetry.thread import Telemetry, TraceSender
from runtime.version import plait_version

log = logging.getLogger(__name__)

_PATH: Final = "/v1/traces"
_BASE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN: Final = "http/protobuf"
MISSING: Final = (
    "opentelemetry is not installed: in a clone `./plait run true` installs it, elsewhere "
    "`pip install 'plait[otlp]'`"
)


def endpoint_of_flag(base: str | None) -> str | None:
    """The URL that spans are posted to, of a collector's base URL.

    Raises ValueError where that cannot be done.
    """
    if base is None:
        return None
    if not is_installed():
        raise ValueError(f"otlp_endpoint is {base}, but {MISSING}")
    return _checked("otlp_endpoint", _with_path(base))


def endpoint_of_environment(environ: Mapping[str, str]) -> str | None:
    """Likewise, of the variables; None: they want no spans, or none can be sent.

    What the environment asks for in vain, it may ask of other programs: that is a line in the log.
    """
    try:
        return _of_environment(environ)
    except ValueError as error:
        log.warning("no traces are sent: %s", error)
        return None


def _of_environment(environ: Mapping[str, str]) -> str | None:
    """Raises ValueError where it asks for what cannot be done."""
    name = _TRACES if environ.get(_TRACES) else _BASE
    wanted = environ.get(name)
    if not wanted or _is_off(environ):
        return None
    url = _checked(name, wanted if name == _TRACES else _with_path(wanted))
    protocol = next((environ[each] for each in _PROTOCOLS if environ.get(each)), _SPOKEN)
    if protocol != _SPOKEN:
        raise ValueError(f"{name} is for {protocol}, and {_SPOKEN} alone is spoken")
    if not is_installed():
        raise ValueError(f"{name} is {wanted}, but {MISSING}")
    return url


def telemetry_to(endpoint: str | None, loops: int) -> Telemetry | None:
    """What sends the traces of so many HTTP loops there; None where there is no endpoint."""
    return None if endpoint is None else Telemetry(endpoint, loops, _otlp_sender)


def _otlp_sender(endpoint: str) -> TraceSender:
    from runtime.telemetry.otlp import OtlpSender  # takes a second or more, and is an extra

    return OtlpSender(endpoint, plait_version())


def is_installed() -> bool:
    """Whether spans can be made and sent."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of one of its parents
        return False


def _is_off(environ: Mapping[str, str]) -> bool:
    exporters = environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    return environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or "otlp" not in exporters


def _with_path(base: str) -> str:
    base = base.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _checked(name: str, url: str) -> str:
    """Raises ValueError."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ValueError(f"{name} is {url}; it must be like http://collector:4318")
    return url
