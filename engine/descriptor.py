"""The step descriptor: one contiguous int32 block that says all that a device must know of a step.

It is what is copied to the GPU, what rank 0 broadcasts, and what a test prints. It carries changes
only: a device keeps its rows' state between steps.

Guarantees
- Sections follow the header in the order of `StepDescriptor._parts`; each is a C-contiguous int32
  array.
- A row's `joined` entry precedes or accompanies its first use; `page_writes` are applied before the
  step's tokens are computed; an entry never names the dummy row.

What a device does with a step
- `joined`: set the row's sampling parameters; what it remembered of the row is gone.
- `rules`: what is done to the row's logits from now on (gpu_ops.rules).
- `page_writes`: page_table[row, index] = page (a new page, or a canonical page after a merge).
- `copies`: between the device's pages and slots of host memory, one after the other, each step's
  after those of the step before. A step's tokens are computed after the copies of all steps before
  it; after its own, too, only where it says `copies.first`. So what is loaded is first read by a
  later step, and a page whose contents are copied out may be written by the same step only with
  `first`. Nothing else needs to be waited for: what is copied out was computed by a step that has
  completed, and what is copied in goes to a page that no step in flight names.
- each segment (row, start, count, samples): compute the next `count` prefill tokens at positions
  [start, start + count) and set length[row] = start + count. If `samples`, the token sampled from
  the last position becomes last_token[row]; else nothing is sampled.
- each decode row: compute last_token[row] at position length[row], then length[row] += 1, and the
  sampled token becomes last_token[row].
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from engine.request import Int32Array
from gpu_ops.rules import RULE_WORDS

INT32_MAX: Final = 2**31 - 1
VERSION: Final = 3
HEADER_WORDS: Final = 16
# Words of the header.
(
    H_VERSION,
    H_STEP,
    H_WORDS,
    H_FLAGS,
    H_JOINED,
    H_PAGE_WRITES,
    H_SEGMENTS,
    H_PREFILL_TOKENS,
    H_DECODE,
    H_MAX_LENGTH,
    H_RULES,
    H_MASKS,
    H_MASK_WORDS,
    H_COPIES,
) = range(14)
# Flags.
SAME_DECODE_ROWS: Final = 1  # decode rows are those of the previous step, and not repeated
COPIES_FIRST: Final = 2  # the step's tokens are computed after its copies

JOINED_WORDS: Final = 8  # row, temperature, top_k, top_p, min_p, seed low, seed high, logprobs
PAGE_WRITE_WORDS: Final = 3  # row, index, page
SEGMENT_WORDS: Final = 4  # row, start, count, samples
COPY_WORDS: Final = 3  # direction, page of the device, slot of the host
PAGE_OUT: Final = 0  # directions: from page to slot
PAGE_IN: Final = 1  # from slot to page


class PageCopies(NamedTuple):
    """What a step copies between the tiers of the prefix cache."""

    words: Int32Array  # [n, 3] int32: direction, page, slot; in this order
    first: bool = False  # before the step's tokens are computed


NO_COPIES: Final = PageCopies(np.empty((0, COPY_WORDS), np.int32))


def logprob_word(output: int | None, prompt: int | None) -> int:
    """How many likeliest ids are wanted of each new, and of each prompt token; None: nothing is."""
    return (0 if output is None else output + 1) | (0 if prompt is None else prompt + 1) << 8


def output_logprobs(words: Int32Array) -> Int32Array:
    """[n] of `logprob_word`s: likeliest ids wanted of each new token; -1: nothing is."""
    wanted: Int32Array = (words & 0xFF) - 1
    return wanted


def prompt_logprobs(words: Int32Array) -> Int32Array:
    """As `output_logprobs`, of each prompt token."""
    wanted: Int32Array = (words >> 8) - 1
    return wanted


@cache
def no_words(columns: int) -> Int32Array:
    """[0, columns] int32, of which there is one for all: it has no word to write."""
    return np.empty((0, columns), np.int32)


@dataclass(frozen=True, slots=True)
class StepDescriptor:
    """One step's changes and work, as arrays.

    joined          [n, 8] int32: row, then float32 bits of temperature, top_k, float32 bits of
                    top_p and min_p, the seed's low and high words, and what logprobs are asked
                    for: `logprob_word`
    page_writes     [n, 3] int32: row, index in its page table, page
    segments        [n, 4] int32: row, start, count, samples (0 or 1)
    prefill_tokens  [sum of counts] int32, in the segments' order
    decode_rows     [n] int32
    max_length      longest row after this step, in tokens
    rules           [n, 4] int32: row, kind, token id, value (gpu_ops.rules)
    mask_rows       [n] int32, rows that draw in this step, each under its mask
    masks           [n, words] int32, a bit for each id that may be drawn
    copies          [n, 3] int32, and whether they come first: `PageCopies`
    """

    step: int
    decode_rows: Int32Array
    same_decode_rows: bool = False
    max_length: int = 0
    joined: Int32Array = field(default_factory=lambda: no_words(JOINED_WORDS))
    page_writes: Int32Array = field(default_factory=lambda: no_words(PAGE_WRITE_WORDS))
    segments: Int32Array = field(default_factory=lambda: no_words(SEGMENT_WORDS))
    prefill_tokens: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    rules: Int32Array = field(default_factory=lambda: no_words(RULE_WORDS))
    mask_rows: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    masks: Int32Array = field(default_factory=lambda: no_words(0))
    copies: PageCopies = NO_COPIES

    @property
    def sampled(self) -> int:
        """How many tokens this step samples."""
        return int(self.segments[:, 3].sum()) + len(self.decode_rows)

    def _parts(self) -> tuple[Int32Array, ...]:
        decode = self.decode_rows[:0] if self.same_decode_rows else self.decode_rows
        # Sections of which a pass over the rows knows nothing come last.
        return (
            *(self.joined, self.page_writes, self.segments, self.prefill_tokens, decode),
            *(self.rules, self.mask_rows, self.masks, self.copies.words),
        )

    def encode_into(self, block: Int32Array) -> Int32Array:
        """Writes the first words of `block` and returns them; a new block where it has too few."""
        parts, words = self._parts(), HEADER_WORDS
        for part in parts:
            words += part.size
        out = block[:words] if words <= len(block) else np.empty(words, np.int32)
        flags = SAME_DECODE_ROWS if self.same_decode_rows else 0
        flags |= COPIES_FIRST if self.copies.first else 0
        step = self.step & INT32_MAX  # 2**31 steps of a small model are a month of serving
        # In the order of H_VERSION to H_COPIES, and at once: this is done in every step.
        out[:HEADER_WORDS] = (
            VERSION, step, out.size, flags, len(self.joined), len(self.page_writes),
            len(self.segments), self.prefill_tokens.size, self.decode_rows.size, self.max_length,
            len(self.rules), *self.masks.shape, len(self.copies.words), 0, 0,
        )  # fmt: skip
        at = HEADER_WORDS
        for part in parts:
            if part.size:
                out[at : at + part.size] = part.reshape(-1)
                at += part.size
        return out

    def encode(self) -> Int32Array:
        """A block of its own."""
        return self.encode_into(np.empty(0, np.int32))


def decode(block: Int32Array, previous_decode_rows: Int32Array) -> StepDescriptor:
    """The descriptor in `block`, as views into it.

    previous_decode_rows  [m] int32, the decode rows of the step before

    Raises ValueError where the block is not a descriptor of this version.
    """
    header = block[:HEADER_WORDS].tolist()  # a list is read many times faster than an array
    if len(header) < HEADER_WORDS or header[H_VERSION] != VERSION or header[H_WORDS] != block.size:
        raise ValueError(f"not a step descriptor of version {VERSION}: {header}")
    at = HEADER_WORDS

    def take(rows: int, columns: int) -> Int32Array:
        nonlocal at
        if not rows:
            return no_words(columns)  # most sections of most steps
        part = block[at : at + rows * columns].reshape(rows, columns)
        at += rows * columns
        return part

    joined = take(header[H_JOINED], JOINED_WORDS)
    page_writes = take(header[H_PAGE_WRITES], PAGE_WRITE_WORDS)
    segments = take(header[H_SEGMENTS], SEGMENT_WORDS)
    prefill_tokens = take(header[H_PREFILL_TOKENS], 1)[:, 0]
    same = bool(header[H_FLAGS] & SAME_DECODE_ROWS)
    decode_rows = previous_decode_rows if same else take(header[H_DECODE], 1)[:, 0]
    rules = take(header[H_RULES], RULE_WORDS)
    mask_rows = take(header[H_MASKS], 1)[:, 0]
    masks = take(header[H_MASKS], header[H_MASK_WORDS])
    copies = PageCopies(take(header[H_COPIES], COPY_WORDS), bool(header[H_FLAGS] & COPIES_FIRST))
    if at != block.size or decode_rows.size != header[H_DECODE]:
        raise ValueError(f"step descriptor's counts do not add up: {header}")
    return StepDescriptor(
        step=header[H_STEP],
        decode_rows=decode_rows,
        same_decode_rows=same,
        max_length=header[H_MAX_LENGTH],
        joined=joined,
        page_writes=page_writes,
        segments=segments,
        prefill_tokens=prefill_tokens,
        rules=rules,
        mask_rows=mask_rows,
        masks=masks,
        copies=copies,
    )
