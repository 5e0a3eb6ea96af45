"""Drives an executor by hand-made descriptors: pages and chunks as a test wants them."""

from collections.abc import Iterable, Sequence

import numpy as np

from engine.descriptor import StepDescriptor
from engine.executor import Executor
from engine.request import Int32Array, SamplingParams

GREEDY = SamplingParams(max_new_tokens=0, temperature=0.0)


def int32(values: Iterable[object]) -> Int32Array:
    return np.array([*values], np.int32)


class StepDriver:
    """Rows and pages for an executor, without a scheduler. Owned by the test's thread.

    Pages are handed out from `pages`, by default in a shuffled order, so that no row's are
    consecutive; a row gets one whenever its next token needs it.
    """

    def __init__(self, executor: Executor, pages: Sequence[int] | None = None) -> None:
        self._executor = executor
        order = np.random.default_rng(1).permutation(np.arange(1, executor.pages))
        self._free = [int(page) for page in (order if pages is None else pages)][::-1]
        self._lengths: dict[int, int] = {}
        self._step = 0
        self._joined: list[list[int]] = []

    def join(self, row: int, params: SamplingParams = GREEDY) -> None:
        """The row starts with an empty sequence and these sampling parameters."""
        self._lengths[row] = 0
        seed = int32([0, 0]) if params.seed is None else np.array([params.seed]).view(np.int32)
        floats = np.array([params.temperature, params.top_p, params.min_p], np.float32)
        temperature, top_p, min_p = floats.view(np.int32)
        self._joined.append([row, temperature, params.top_k, top_p, min_p, *seed, 0])

    def step(
        self,
        prefill: Sequence[tuple[int, Sequence[int], bool]] = (),
        decode: Sequence[int] = (),
        same: bool = False,
    ) -> list[int]:
        """Runs (row, tokens, samples) segments and decode rows; returns the sampled tokens."""
        segments, page_writes = [], []
        for row, tokens, samples in prefill:
            start = self._lengths[row]
            segments.append([row, start, len(tokens), samples])
            page_writes += self._grow(row, len(tokens))
        for row in decode:
            page_writes += self._grow(row, 1)
        self._step += 1
        descriptor = StepDescriptor(
            step=self._step,
            decode_rows=int32(decode),
            same_decode_rows=same,
            max_length=max(self._lengths.values()),
            joined=int32(self._joined).reshape(-1, 8),
            page_writes=int32(page_writes).reshape(-1, 3),
            segments=int32(segments).reshape(-1, 4),
            prefill_tokens=int32(token for _, tokens, _ in prefill for token in tokens),
        )
        self._joined = []
        block = descriptor.encode()
        launched = self._executor.launch_no_sync(block)
        block[:] = -1  # the executor must have copied what it keeps
        return [int(token) for token in launched.wait_tokens_sync()]

    def _grow(self, row: int, tokens: int) -> list[list[int]]:
        size, length = self._executor.page_size, self._lengths[row]
        self._lengths[row] = length + tokens
        have, need = -(-length // size), -(-(length + tokens) // size)
        return [[row, index, self._free.pop()] for index in range(have, need)]

    def generate(self, row: int, prompt: Sequence[int], count: int, chunk: int) -> list[int]:
        """`count` tokens after `prompt`, which goes in chunks of at most `chunk`."""
        self.join(row)
        chunks = [prompt[at : at + chunk] for at in range(0, len(prompt), chunk)]
        out: list[int] = []
        for index, tokens in enumerate(chunks):
            out += self.step([(row, tokens, index == len(chunks) - 1)])
        while len(out) < count:
            out += self.step(decode=[row])
        return out
