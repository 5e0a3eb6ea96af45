"""An executor whose "model" can be checked: a token depends on every token before it, by position.

Its KV pages hold (token, position) per slot. Computing a row reads them all back through the page
table, so that one page too early, too late or in the wrong place changes what comes out, or fails.
What nobody has written fails, too: a row reads nothing of others (CVE-2026-7141).
Slots of host memory hold pages. Copies are made as late as the descriptor's rules allow, or as
early: what relies on anything in between fails in one of them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine import descriptor as d
from engine.core import Engine, EngineFacts
from engine.executor import Executor
from engine.logprobs import StepLogprobs
from engine.request import Int32Array, Logprobs
from engine.scheduler import Scheduler

VOCAB = 97


def next_token(tokens: list[int] | Int32Array) -> int:
    """What the fake model says after these tokens."""
    ids = np.asarray(tokens, np.int64)
    weights = np.arange(1, len(ids) + 1, dtype=np.int64) * 7919 + 13
    return int((ids * weights % 10_007).sum() % VOCAB)


def expected_output(
    prompt: Int32Array,
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    grammar: "FakeGrammar | None" = None,
) -> list[int]:
    """The output of a request that has the machine for itself."""
    tokens = list(map(int, prompt))
    output: list[int] = []
    while len(output) < max_new_tokens and (not output or output[-1] not in stop_ids):
        token = next_token(tokens)
        if grammar is not None:
            token = next_allowed(token, grammar.allowed(output))
        output.append(token)
        tokens.append(token)
    return output


def next_allowed(token: int, allowed: set[int]) -> int:
    """The token, or the first one after it that may come."""
    return next(one % VOCAB for one in range(token, token + VOCAB) if one % VOCAB in allowed)


@dataclass(frozen=True)
class FakeGrammar:
    """Every token leaves a rest that depends on all before it."""

    modulus: int

    def allowed(self, output: list[int]) -> set[int]:
        rest = sum(output) % self.modulus
        return {token for token in range(VOCAB) if token % self.modulus == rest}

    def matcher(self, stop_ids: Sequence[int]) -> "FakeMatcher":
        return FakeMatcher(self)


class FakeMatcher:
    """Satisfies engine.request.Matcher."""

    mask_words = -(-VOCAB // 32)

    def __init__(self, grammar: FakeGrammar) -> None:
        self._grammar = grammar
        self._output: list[int] = []

    def fill_mask(self, row: Int32Array) -> None:
        bits = np.zeros(32 * self.mask_words, np.bool_)
        bits[list(self._grammar.allowed(self._output))] = True
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        fits = token_id in self._grammar.allowed(self._output)
        self._output.append(token_id)
        return fits


@dataclass
class FakeStep:
    """A step in flight; `tokens` are computed at once, as a serial device would."""

    executor: "FakeExecutor"
    tokens: Int32Array
    read_pages: dict[int, int] = field(default_factory=dict)  # page → row that reads or writes it
    logprobs: StepLogprobs | None = None

    def wait_tokens_sync(self) -> Int32Array:
        assert self.executor.in_flight.popleft() is self, "steps are committed out of order"
        return self.tokens

    def wait_logprobs_sync(self) -> StepLogprobs | None:
        return self.logprobs


def fake_logprobs(tokens: list[int], k: int) -> Logprobs:
    """Those of a model that gives each id its negative as its log-probability."""
    ids = np.array(tokens, np.int32)
    top = np.broadcast_to(np.arange(k, dtype=np.int32), (len(ids), k))
    return Logprobs(-ids.astype(np.float32), ids + 1, top, -top.astype(np.float32))


class FakeExecutor:
    """Satisfies engine.executor.Executor."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        max_rows: int,
        max_pages: int,
        *,
        host_slots: int = 0,
        late_copies: bool = True,
    ) -> None:
        self.pages, self.page_size, self.vocab_size = pages, page_size, VOCAB
        self.kv = np.full((pages * page_size, 2), -1, np.int64)
        self.host = np.full((host_slots, page_size, 2), -1, np.int64)
        self.late_copies = late_copies
        self.late: Int32Array | None = None  # copies of the last step, still to be made
        self.page_table = np.zeros((max_rows + 1, max_pages), np.int32)
        self.length = np.zeros(max_rows + 1, np.int64)
        self.last_token = np.full(max_rows + 1, -1, np.int64)
        self.logprob_words = np.zeros(max_rows + 1, np.int32)
        self.masks: dict[int, Int32Array] = {}
        self.previous_decode = np.empty(0, np.int32)
        self.in_flight: deque[FakeStep] = deque()
        self.steps = 0
        self.closed = False

    def launch_no_sync(self, descriptor: Int32Array) -> FakeStep:
        step = d.decode(descriptor.copy(), self.previous_decode)
        assert step.step == self.steps + 1
        self.steps, self.previous_decode = step.step, step.decode_rows
        launched = FakeStep(self, np.empty(0, np.int32))
        self._start_copies(step)
        written = {(int(row), int(index)) for row, index, _ in step.page_writes}
        assert len(written) == len(step.page_writes), "one entry is written twice in a step"
        self.page_table[step.page_writes[:, 0], step.page_writes[:, 1]] = step.page_writes[:, 2]
        self.logprob_words[step.joined[:, 0]] = step.joined[:, 7]
        self.masks = dict(zip(step.mask_rows.tolist(), step.masks, strict=True))
        tokens: list[int] = []
        at = 0
        for row, start, count, samples in step.segments.tolist():
            for position, token in enumerate(step.prefill_tokens[at : at + count], start):
                self._store(launched, row, position, int(token))
            at += count
            self.length[row] = start + count
            if samples:
                tokens.append(self._sample(launched, row))
        assert len(set(step.decode_rows.tolist())) == len(step.decode_rows)
        for row in step.decode_rows.tolist():
            self._store(launched, row, int(self.length[row]), int(self.last_token[row]))
            self.length[row] += 1
            tokens.append(self._sample(launched, row))
        launched.tokens = np.array(tokens, np.int32)
        assert len(tokens) == step.sampled
        assert not self.masks, "a mask is there for a row that draws nothing"
        launched.logprobs = self._logprobs(step, tokens)
        self.in_flight.append(launched)
        return launched

    def _start_copies(self, step: d.StepDescriptor) -> None:
        """Those of the step before are made by now; this one's now, or with the next step."""
        if self.late is not None:
            self._copy(self.late)
            self.late = None
        for direction, page, slot in step.copies.words.tolist():
            assert page != 0 and slot != 0
            used = any(page in other.read_pages for other in self.in_flight)
            assert direction == d.PAGE_OUT or not used, f"page {page} is loaded while it is used"
        if self.late_copies and not step.copies.first:
            self.late = step.copies.words.copy()
        else:
            self._copy(step.copies.words)

    def _copy(self, copies: Int32Array) -> None:
        pages = self.kv.reshape(self.pages, self.page_size, 2)
        for direction, page, slot in copies.tolist():
            if direction == d.PAGE_OUT:
                self.host[slot] = pages[page]
            else:
                pages[page] = self.host[slot]

    def _logprobs(self, step: d.StepDescriptor, tokens: list[int]) -> StepLogprobs | None:
        rows = [row for row, _, _, samples in step.segments.tolist() if samples]
        rows += step.decode_rows.tolist()
        wanted = self.logprob_words[rows] & 255
        indices = np.nonzero(wanted)[0].astype(np.int32)
        prompts, at = [], 0
        for row, start, count, _ in step.segments.tolist():
            ids = step.prefill_tokens[at : at + count].tolist()
            at += count
            k = int(self.logprob_words[row] >> 8)
            if k:
                prompts.append((row, fake_logprobs(ids[0 if start else 1 :], k - 1)))
        if not len(indices) and not prompts:
            return None
        k = int(wanted.max(initial=1)) - 1
        sampled = fake_logprobs([tokens[index] for index in indices], k) if len(indices) else None
        return StepLogprobs(indices, sampled, tuple(prompts))

    def _store(self, launched: FakeStep, row: int, position: int, token: int) -> None:
        page = int(self.page_table[row, position // self.page_size])
        assert page != 0, "a token was stored in the dummy page"
        for other in self.in_flight:
            reader = other.read_pages.get(page, row)
            assert reader == row, f"page {page} is written while row {reader}'s step is in flight"
        launched.read_pages[page] = row
        self.kv[page * self.page_size + position % self.page_size] = token, position

    def _sample(self, launched: FakeStep, row: int) -> int:
        length = int(self.length[row])
        positions = np.arange(length)
        pages = self.page_table[row, positions // self.page_size]
        kv = self.kv[pages * self.page_size + positions % self.page_size]
        assert (kv[:, 1] == positions).all(), f"row {row} reads another position's page"
        launched.read_pages.update(dict.fromkeys(pages.tolist(), row))
        token = next_token(kv[:, 0])
        mask = self.masks.pop(row, None)
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            token = next_allowed(token, set(np.nonzero(bits)[0].tolist()))
        self.last_token[row] = token
        return int(self.last_token[row])

    def close(self) -> None:
        self.closed = True


def fake_engine(scheduler: Scheduler, executor: Executor, *, overlap: bool) -> Engine:
    """An engine over a scheduler and an executor that nobody loaded."""
    facts = EngineFacts(
        max_model_len=scheduler.max_model_len,
        kv_tokens=scheduler.holdings.pool.capacity * scheduler.page_size,
        vocab_size=executor.vocab_size,
        page_size=scheduler.page_size,
        device="fake",
        dtype="fake",
        overlap=overlap,
    )
    return Engine(scheduler, executor, overlap=overlap, facts=facts)
