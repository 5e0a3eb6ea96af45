"""The step descriptor survives its encoding, and a block that is none is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine import descriptor as d

WORD = st.integers(-(2**31), 2**31 - 1)


def words(columns: int) -> st.SearchStrategy[np.ndarray]:
    return st.integers(0, 5).flatmap(lambda n: arrays(np.int32, (n, columns), elements=WORD))


@given(
    joined=words(d.JOINED_WORDS),
    writes=words(d.PAGE_WRITE_WORDS),
    segments=words(d.SEGMENT_WORDS),
    tokens=words(1),
    decode=words(1),
    same=st.booleans(),
    rules=words(d.RULE_WORDS),
    masks=words(7),
)
def test_round_trip(
    joined: np.ndarray,
    writes: np.ndarray,
    segments: np.ndarray,
    tokens: np.ndarray,
    decode: np.ndarray,
    same: bool,
    rules: np.ndarray,
    masks: np.ndarray,
) -> None:
    step = d.StepDescriptor(
        step=9, decode_rows=decode[:, 0], same_decode_rows=same, max_length=77, joined=joined,
        page_writes=writes, segments=segments, prefill_tokens=tokens[:, 0],
        rules=rules, mask_rows=masks[:, 0], masks=masks,
    )  # fmt: skip
    back = d.decode(step.encode(), previous_decode_rows=decode[:, 0])
    assert (back.step, back.same_decode_rows, back.max_length) == (9, same, 77)
    for name in (
        *("joined", "page_writes", "segments", "prefill_tokens", "decode_rows"),
        *("rules", "mask_rows", "masks"),
    ):
        np.testing.assert_array_equal(getattr(back, name), getattr(step, name))


def test_same_decode_rows_cost_no_words() -> None:
    rows = np.arange(256, dtype=np.int32)
    again = d.StepDescriptor(step=2, decode_rows=rows, same_decode_rows=True)
    assert len(again.encode()) == d.HEADER_WORDS


def test_the_step_number_wraps_where_int32_ends() -> None:
    step = d.StepDescriptor(step=2**31 + 5, decode_rows=np.zeros(1, np.int32))
    assert d.decode(step.encode(), step.decode_rows).step == 5


def test_a_block_that_is_none_is_refused() -> None:
    block = d.StepDescriptor(step=1, decode_rows=np.arange(3, dtype=np.int32)).encode()
    none = np.empty(0, np.int32)
    for wrong in (block[:-1], block[:4], np.zeros_like(block)):
        with pytest.raises(ValueError, match="not a step descriptor"):
            d.decode(wrong, none)
    lies = block.copy()
    lies[d.H_DECODE] = 2
    with pytest.raises(ValueError, match="do not add up"):
        d.decode(lies, none)
