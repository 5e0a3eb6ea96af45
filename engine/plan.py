"""One step as the scheduler puts it together, and the snapshot that its commit needs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.descriptor import (
    INT32_MAX,
    JOINED_WORDS,
    PAGE_WRITE_WORDS,
    SEGMENT_WORDS,
    PageCopies,
    StepDescriptor,
    logprob_word,
    no_words,
)
from engine.request import Int32Array, Request
from gpu_ops.rules import RULE_WORDS


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launched step. Results are committed against it, never against the state of that moment.

    sample_rows       [sampled] rows in the order of the sampled tokens
    sample_positions  [sampled] int32, each token's index in its sequence
    chunk_rows        [n] rows whose chunk samples nothing, or is loaded from the host
    chunk_ends        [n] int32, positions that are valid once the chunk is done
    prefilled_rows    rows whose prompt is complete with this step
    """

    descriptor: StepDescriptor
    sample_rows: NDArray[np.intp]
    sample_positions: Int32Array
    chunk_rows: NDArray[np.intp]
    chunk_ends: Int32Array
    prefilled_rows: tuple[int, ...]

    @property
    def step(self) -> int:
        return self.descriptor.step


class Draft:
    """A step being put together, in lists. Owned by the engine thread; lives for one `plan`."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, int, int, bool]] = []  # row, start, count, samples
        self.loads: list[tuple[int, int]] = []  # row, end: positions that come from the host
        self.page_writes: list[Int32Array] = []  # [n, 3] each
        self._tokens: list[Int32Array] = []
        self._joined: list[Int32Array] = []
        self._rules: list[Int32Array] = []

    def join(self, row: int, request: Request, pages: Int32Array, rules: Int32Array) -> None:
        """A row's parameters, its first pages and its rules, as `engine.rules` makes them."""
        self._joined.append(_joined_words(row, request))
        self._rules.append(rules)
        self.write_pages(np.full(len(pages), row), np.arange(len(pages)), pages)

    def write_pages(
        self, rows: NDArray[np.intp], indices: NDArray[np.integer], pages: Int32Array
    ) -> None:
        self.page_writes.append(page_writes(rows, indices, pages))

    def add_segment(self, row: int, start: int, tokens: Int32Array, samples: bool) -> None:
        self.segments.append((row, start, len(tokens), samples))
        self._tokens.append(tokens)

    def sampling_rows(self) -> NDArray[np.intp]:
        """Rows whose segment samples, in order."""
        return np.array([row for row, *_, samples in self.segments if samples], np.intp)

    def finish(
        self,
        step: int,
        decode: NDArray[np.intp],
        same_decode: bool,
        positions: Int32Array,
        writes: list[Int32Array],
        masks: tuple[Int32Array, Int32Array],
        copies: PageCopies,
    ) -> StepPlan:
        """The plan. `positions` are those of the decode rows' sampled tokens."""
        sampling = [(row, start + count) for row, start, count, samples in self.segments if samples]
        chunks = [(r, start + count) for r, start, count, samples in self.segments if not samples]
        chunks += self.loads
        ends = [start + count for _, start, count, _ in self.segments]
        prefilled = tuple(row for row, _ in sampling)
        descriptor = StepDescriptor(
            step=step,
            decode_rows=decode.astype(np.int32),
            same_decode_rows=same_decode,
            max_length=max(int(positions.max(initial=0)), max(ends, default=0)),
            joined=_stack(self._joined, JOINED_WORDS),
            page_writes=_stack(writes, PAGE_WRITE_WORDS),
            segments=np.array(self.segments, np.int32).reshape(-1, SEGMENT_WORDS),
            prefill_tokens=np.concatenate(self._tokens) if self._tokens else _NO_TOKENS,
            rules=_stack(self._rules, RULE_WORDS),
            mask_rows=masks[0],
            masks=masks[1],
            copies=copies,
        )
        if sampling:
            first, head = _columns(sampling)
            decode = np.concatenate([first, decode])
            positions = np.concatenate([head, positions])
        return StepPlan(descriptor, decode, positions, *_columns(chunks), prefilled)


_NO_ROWS, _NO_TOKENS = np.empty(0, np.intp), np.empty(0, np.int32)


def _columns(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.intp], Int32Array]:
    """[n] rows, and [n] what belongs to each."""
    if not pairs:
        return _NO_ROWS, _NO_TOKENS
    rows, others = zip(*pairs, strict=True)
    return np.array(rows, np.intp), np.array(others, np.int32)


def page_writes(
    rows: NDArray[np.intp], indices: NDArray[np.integer], pages: Int32Array
) -> Int32Array:
    """[n, 3] int32: page_table[row, index] = page, for a descriptor."""
    out = np.empty((len(pages), PAGE_WRITE_WORDS), np.int32)
    out[:, 0], out[:, 1], out[:, 2] = rows, indices, pages
    return out


def _joined_words(row: int, request: Request) -> Int32Array:
    params = request.params
    words = np.zeros(JOINED_WORDS, np.int32)
    floats = words.view(np.float32)
    words[0], words[2] = row, min(params.top_k, INT32_MAX)
    floats[1], floats[3], floats[4] = params.temperature, params.top_p, params.min_p
    words[5:7] = np.array([request.seed], np.uint64).view(np.int32)
    words[7] = logprob_word(params.logprobs, params.prompt_logprobs)
    return words


def _stack(parts: list[Int32Array], columns: int) -> Int32Array:
    if not parts:
        return no_words(columns)
    stacked = parts[0] if len(parts) == 1 else np.concatenate([part.ravel() for part in parts])
    return stacked.reshape(-1, columns)
