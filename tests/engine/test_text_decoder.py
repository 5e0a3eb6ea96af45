"""Decoding one id at a time against decoding all at once."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text_decoder import TextDecoders
from tests.fakes_tokenizers import ADDED, BOS, EOS, FAMILIES, TEXTS, shared

BYTE_LEVEL = ("byte_level", "tiktoken")
BYTE_FALLBACK = ("byte_fallback", "gemma")


def pieces_of(family: str, ids: list[int], skip: bool = True) -> list[str]:
    """What each id gives, and last what `finish` gives."""
    decoder = TextDecoders(shared(family)).new(skip_special_tokens=skip)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


def any_ids(family: str) -> st.SearchStrategy[list[int]]:
    tokenizer = shared(family)
    special = [tokenizer.token_to_id(token) for token in (BOS, EOS, ADDED)]
    beyond = [tokenizer.get_vocab_size(), tokenizer.get_vocab_size() + 7]  # padding of the logits
    every = st.integers(0, tokenizer.get_vocab_size() - 1)
    return st.lists(every | st.sampled_from(special + beyond), max_size=40)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("family", BYTE_LEVEL)
@given(data=st.data())
def test_byte_level_is_the_whole_decoding(family: str, skip: bool, data: st.DataObject) -> None:
    ids = data.draw(any_ids(family))
    assert "".join(pieces_of(family, ids, skip)) == shared(family).decode(ids, skip)


@pytest.mark.parametrize("family", BYTE_LEVEL)
@given(raw=st.binary(max_size=24))
def test_byte_level_with_any_bytes(family: str, raw: bytes) -> None:
    byte_ids = single_byte_ids(family)
    ids = [byte_ids[byte] for byte in raw]
    pieces = pieces_of(family, ids)
    assert "".join(pieces) == shared(family).decode(ids) == raw.decode("utf-8", "replace")


def single_byte_ids(family: str) -> dict[int, int]:
    """The id of each byte, found by decoding it between others that make a character of it."""
    tokenizer, found = shared(family), {}
    for token_id in range(tokenizer.get_vocab_size()):
        token = tokenizer.id_to_token(token_id)
        if len(token) == 1:
            code = ord(token)
            found[_byte_of(code)] = token_id
    assert sorted(found) == list(range(256))
    return found


def _byte_of(code: int) -> int:
    """GPT-2's table, from its definition: the bytes that do not print come from U+0100 on."""
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return hidden[code - 256] if code >= 256 else code


def fallback_text(family: str, ids: list[int], skip: bool) -> str:
    """The decoding of `ids`, but characters before a run's first wrong byte stay."""
    tokenizer = shared(family)
    special = {BOS, EOS} if skip else set()
    tokens = [token for each in ids if (token := tokenizer.id_to_token(each)) is not None]
    text, run = "", b""
    for token in [*(token for token in tokens if token not in special), ""]:
        byte = re.fullmatch(r"<0x(..)>", token)
        if byte:
            run += bytes.fromhex(byte[1])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError as error:
            kept = run[: error.start].decode()
            text += kept + "\ufffd" * (len(run) - error.start)
        text, run = text + token.replace("▁", " "), b""
    return text.removeprefix(" ") if family == "byte_fallback" else text


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("family", BYTE_FALLBACK)
@given(data=st.data())
def test_byte_fallback_is_the_whole_decoding(family: str, skip: bool, data: st.DataObject) -> None:
    ids = data.draw(any_ids(family))
    text = "".join(pieces_of(family, ids, skip))
    assert text == fallback_text(family, ids, skip)
    whole = shared(family).decode(ids, skip)
    if "\ufffd" not in whole:
        assert text == whole
    assert len(text) <= len(whole)  # never a U+FFFD more than there


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", [*TEXTS, "  two spaces", " lead", "", "\n\n", "a\tb  c   d"])
def test_encoded_text_comes_back_as_decoded(family: str, text: str) -> None:
    ids = shared(family).encode(text).ids
    assert "".join(pieces_of(family, ids)) == shared(family).decode(ids)


@pytest.mark.parametrize("family", ["metaspace", "word_level"])
@given(data=st.data())
@settings(max_examples=50)
def test_other_decoders_are_the_whole_decoding(family: str, data: st.DataObject) -> None:
    ids = data.draw(any_ids(family))
    assert "".join(pieces_of(family, ids)) == shared(family).decode(ids)


@pytest.mark.parametrize("family", [*BYTE_LEVEL, *BYTE_FALLBACK])
@given(text=st.text(max_size=20))
def test_characters_come_with_the_id_that_completes_them(family: str, text: str) -> None:
    """At every id: all complete characters so far, and never half of one."""
    ids = shared(family).encode(text, add_special_tokens=False).ids
    pieces = pieces_of(family, ids)
    so_far = ""
    for count, piece in enumerate(pieces[:-1], 1):
        so_far += piece
        whole = shared(family).decode(ids[:count])
        if "\ufffd" not in text:
            assert "\ufffd" not in so_far
            # the decoding of a prefix ends in U+FFFD where a character is incomplete
            if "\ufffd" not in whole:
                assert so_far == whole
    assert pieces[-1] == ""


def test_a_byte_run_releases_each_character() -> None:
    """Cut off by the length limit inside a character, what was complete stays."""
    ids = [shared("gemma").token_to_id(f"<0x{byte:02X}>") for byte in "你好".encode()[:5]]
    assert pieces_of("gemma", ids) == ["", "", "你", "", "", "\ufffd\ufffd"]


def test_a_skipped_special_token_does_not_break_a_character() -> None:
    tokenizer = shared("byte_level")
    first, *rest = tokenizer.encode("🎉", add_special_tokens=False).ids
    assert rest
    ids = [first, tokenizer.token_to_id(EOS), *rest]
    assert "".join(pieces_of("byte_level", ids)) == tokenizer.decode(ids) == "🎉"
