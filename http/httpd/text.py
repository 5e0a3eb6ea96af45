"""Text at the edge: always valid UTF-8 on the way in, always valid JSON on the way out.

Output is ASCII-only JSON on purpose. Line readers that split at U+2028, U+0085 and their like cut
an SSE line in two where such a character stands unescaped, and ASCII is valid UTF-8 whatever the
model says.
"""

import json

SHOWN_CHARS = 48


def well_formed(text: str) -> str:
    """The same text with each lone surrogate replaced by U+FFFD, as browsers do."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def json_string(text: str) -> str:
    """`text` as a JSON string literal, quotes included."""
    return json.dumps(well_formed(text))


def json_text(value: object) -> str:
    """Compact ASCII JSON. Raises ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def json_bytes(value: object) -> bytes:
    """`json_text` as bytes."""
    return json_text(value).encode()


def shown_name(name: str) -> str:
    """A name from a request as a part of a path: short and printable, without quotes."""
    return json_string(name[:SHOWN_CHARS])[1:-1] + ("…" if len(name) > SHOWN_CHARS else "")


def shown(value: object) -> str:
    """A value from a request, short and printable, for an error message or the log."""
    if isinstance(value, str):
        cut = len(value) > SHOWN_CHARS
        return json_string(value[:SHOWN_CHARS]) + ("…" if cut else "")
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return json.dumps(value)
