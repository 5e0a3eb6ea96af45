"""Token ids to text one id at a time, equal to decoding all of them at once.

Guarantees, for `push` of each id followed by one `finish`
- The pieces joined are `tokenizer.decode` of all ids. One exception: byte-fallback tokenizers
  decode a run of byte tokens that is not valid UTF-8 to U+FFFD throughout, while characters of that
  run that were complete before the first wrong byte were sent here already, and stay.
- A character is released with the id that completes it; an incomplete one is held until `finish`.
- Each id costs the same, however long the text (for tokenizers of an unknown kind: in practice).

Three kinds of tokenizers: byte-level (GPT-2, Llama 3, Qwen, tiktoken's), whose ids are bytes;
byte-fallback (SentencePiece: Llama 2, Mistral, Gemma), whose ids are text or single bytes; and all
others, decoded by a window of a few ids.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

import tokenizers

_UTF8: Final = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT: Final = "\ufffd"
_NONE: Final = frozenset[str]()
# An unknown tokenizer's text that ends in U+FFFD is held for more bytes of its character; a
# character has 4 bytes at most, so after this many ids the U+FFFD is meant.
_WINDOW_IDS: Final = 8


class TextDecoder(Protocol):
    """The decode state of one response. Owned by the detokenizer thread."""

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" for one that is skipped or completes nothing."""
        ...

    def finish(self) -> str:
        """What an incomplete character at the end decodes to. Called once, after the last id."""
        ...


class TextDecoders:
    """Makes a tokenizer's decoders, which share its tables. Owned by the detokenizer thread."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        # By the tokens that are skipped.
        self._kinds = {skipped: _kind(backend, skipped) for skipped in (_NONE, self._special)}

    def new(self, *, skip_special_tokens: bool, kept: Iterable[str] = ()) -> TextDecoder:
        """kept  special tokens that are not skipped"""
        skipped = self._special.difference(kept) if skip_special_tokens else _NONE
        kind = self._kinds.get(skipped)
        if kind is None:  # few: models have one pair of markers
            kind = self._kinds[skipped] = _kind(self._backend, skipped)
        return kind.new()

    def utf8_of(self, token_id: int) -> bytes:
        """The id's own bytes, which may be a part of a character; of a special token, its name."""
        return self._kinds[_NONE].utf8_of(token_id)


class _Kind(NamedTuple):
    new: Callable[[], TextDecoder]
    utf8_of: Callable[[int], bytes]


def _kind(backend: tokenizers.Tokenizer, skipped: frozenset[str]) -> _Kind:
    tokens = _Tokens(backend, skipped)
    spec = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    if spec.get("type") == "ByteLevel":
        byte_pieces = _BytePieces(tokens)
        return _Kind(lambda: ByteLevelDecoder(byte_pieces), lambda i: _utf8(byte_pieces[i]))
    fallback = _fallback_rules(spec)
    if fallback is not None:
        replacements, stripped, strip = fallback
        pieces = _FallbackPieces(tokens, replacements)
        new = lambda: ByteFallbackDecoder(pieces, stripped, strip)  # noqa: E731
        return _Kind(new, lambda token_id: _utf8(pieces[token_id]))
    return _Kind(
        lambda: WindowDecoder(backend, tokens),
        lambda token_id: _utf8(backend.decode([token_id], skip_special_tokens=False)),
    )


def _utf8(piece: str | bytes | int | None) -> bytes:
    """Text or bytes, or one byte, or nothing."""
    if isinstance(piece, str):
        return piece.encode("utf-8", "replace")
    return bytes((piece,)) if isinstance(piece, int) else piece or b""


class _Tokens:
    """The vocabulary as `tokenizer.decode` sees it."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[str]) -> None:
        self._token_of = backend.id_to_token
        self._skipped = skipped

    def __getitem__(self, token_id: int) -> str | None:
        """The token, or None where decoding leaves the id out."""
        token = self._token_of(token_id)
        return None if token in self._skipped else token


class _BytePieces(dict[int, str | bytes]):
    """What each id stands for, worked out when it first comes: start-up pays nothing.

    Text where the id's bytes are whole characters, which most are; else the bytes.
    """

    def __init__(self, tokens: _Tokens) -> None:
        super().__init__()
        self._tokens = tokens
        self._byte_of = _byte_of_char()

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._tokens[token_id] or ""
        piece: str | bytes = token
        try:
            piece = bytes([self._byte_of[char] for char in token])
            piece = piece.decode()
        except (KeyError, UnicodeDecodeError):
            pass  # an added token, which is written as itself; or parts of characters
        self[token_id] = piece
        return piece


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    return dict(zip(chars, printable + others, strict=True))


class ByteLevelDecoder:
    """A byte-level tokenizer's: decodes the ids' bytes. Owned by the detokenizer thread."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: _BytePieces) -> None:
        self._pieces = pieces
        self._pending = b""  # bytes of a character that is not complete

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending:
                return piece
            piece = piece.encode()
        raw = self._pending + piece
        text, consumed = codecs.utf_8_decode(raw, "replace", False)
        self._pending = raw[consumed:]
        return text

    def finish(self) -> str:
        held, self._pending = self._pending, b""
        return held.decode("utf-8", "replace")


class _FallbackPieces(dict[int, str | int | None]):
    """What each id stands for: text, one byte, or None where it is left out."""

    def __init__(self, tokens: _Tokens, replacements: list[tuple[str, str]]) -> None:
        super().__init__()
        self._tokens = tokens
        self._replacements = replacements

    def __missing__(self, token_id: int) -> str | int | None:
        piece: str | int | None = self._tokens[token_id]
        if isinstance(piece, str):
            for old, new in self._replacements:
                piece = piece.replace(old, new)
            byte = _BYTE_TOKEN.fullmatch(piece)
            if byte:
                piece = int(byte[1], 16)
        self[token_id] = piece
        return piece


class ByteFallbackDecoder:
    """A byte-fallback tokenizer's: text, and runs of bytes. Owned by the detokenizer thread."""

    __slots__ = ("_broken", "_pending", "_pieces", "_strip", "_stripped", "_utf8")

    def __init__(self, pieces: _FallbackPieces, stripped: str, strip: int) -> None:
        """stripped, strip  a character, and how many of it are left out where the text begins"""
        self._pieces = pieces
        self._stripped, self._strip = stripped, strip
        self._utf8 = _UTF8("strict")
        self._pending = 0  # bytes of a character that is not complete
        self._broken = False  # this run of bytes is not UTF-8: each is a U+FFFD until it ends

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        text = self._byte(piece) if isinstance(piece, int) else self.finish() + piece
        return self._without_lead(text) if self._strip and text else text

    def finish(self) -> str:
        held = _REPLACEMENT * self._pending
        if self._pending or self._broken:
            self._utf8.reset()
            self._pending, self._broken = 0, False
        return held

    def _byte(self, byte: int) -> str:
        if self._broken:
            return _REPLACEMENT
        try:
            text = self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            held, self._pending, self._broken = self._pending + 1, 0, True
            return _REPLACEMENT * held
        self._pending = 0 if text else self._pending + 1
        return text

    def _without_lead(self, text: str) -> str:
        kept = text.lstrip(self._stripped)
        lead = min(len(text) - len(kept), self._strip)
        self._strip = 0 if kept else self._strip - lead
        return text[lead:]


def _fallback_rules(spec: dict[str, Any]) -> tuple[list[tuple[str, str]], str, int] | None:
    """(replacements, stripped character, how many), where the decoder is Replace* ByteFallback
    [Fuse [Strip at the start]]; else None."""
    steps = spec.get("decoders", [spec] if spec else [])
    kinds = " ".join(step["type"] for step in steps)
    if not re.fullmatch(r"(Replace )*ByteFallback( Fuse( Strip)?)?", kinds):
        return None
    replacements = []
    for step in steps:
        if step["type"] == "Replace":
            old = step["pattern"].get("String")
            if not old:
                return None
            replacements.append((old, step["content"]))
    last = steps[-1]
    if last["type"] != "Strip":
        return replacements, "", 0
    return (replacements, last["content"], last["start"]) if last["stop"] == 0 else None


class WindowDecoder:
    """Any other tokenizer's: compares decoded windows. Owned by the detokenizer thread.

    The text of an id is what it adds to the text of the few before it. The window starts where an
    earlier piece started, so that what a decoder does at the start of a text happens to both texts
    that are compared.
    """

    __slots__ = ("_backend", "_ids", "_new", "_sent", "_tokens")

    def __init__(self, backend: tokenizers.Tokenizer, tokens: _Tokens) -> None:
        self._backend, self._tokens = backend, tokens
        self._ids: list[int] = []  # the window: ids of the last piece, then those not sent
        self._new = 0  # how many are not sent
        self._sent = 0  # characters of the window's text that are

    def push(self, token_id: int) -> str:
        if self._tokens[token_id] is None:
            return ""
        self._ids.append(token_id)
        self._new += 1
        text = self._text()
        if text.endswith(_REPLACEMENT) and self._new < _WINDOW_IDS:
            return ""
        piece = text[self._sent :]
        if piece or self._new == _WINDOW_IDS:
            self._ids = self._ids[-self._new :]
            self._new = 0
            self._sent = len(self._text())
        return piece

    def finish(self) -> str:
        return self._text()[self._sent :] if self._new else ""

    def _text(self) -> str:
        text: str = self._backend.decode(self._ids, skip_special_tokens=False)
        return text
