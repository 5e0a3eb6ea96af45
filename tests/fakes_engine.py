"""A model of bytes for the threads' tests: it answers with the prompt, and fails on demand.

A prompt of the form "WHAT THREAD" makes that thread crash, hang or freeze when it comes to it, for
instance "crash engine" or "hang http". "slow" takes a millisecond a token, and "endless" does not
stop at its limit.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from engine.cache_outline import CacheOutline
from engine.core import EngineStats
from engine.errors import PromptError
from engine.grammar.spec import GrammarError, GrammarSpec, Regex
from engine.request import (
    ChatPrompt,
    Delta,
    Finish,
    Int32Array,
    Prompt,
    Request,
    Started,
    StepOutput,
    TextPrompt,
)
from engine.step_trace import Admitted, Chunk, Refused, Retracted, StepRecord
from httpd.service import ModelCard
from runtime.engine_thread import Load, Loaded, Progress, ServedEngine
from runtime.messages import ModelFacts
from tests.fakes_executor import FakeGrammar

MAX_MODEL_LEN = 4096
CARD = ModelCard(
    id="fake", created=1, max_model_len=MAX_MODEL_LEN, vocab_size=256, has_chat_template=True
)
FACTS = ModelFacts(card=CARD, kv_tokens=1 << 20, device="cpu", dtype="bytes")


class InjectedFault(Exception):
    """What a "crash" raises."""


def act_on(text: str, thread: str) -> None:
    """Crashes or hangs where `text` says so for this thread."""
    if text == f"crash {thread}":
        raise InjectedFault(text)
    if text == f"hang {thread}":
        hang()
    if text == f"freeze {thread}":
        freeze()


def hang() -> NoReturn:
    while True:
        threading.Event().wait(60)


def freeze() -> None:
    """Hangs in C without letting the interpreter go on: whoever stops all threads waits for it."""
    ctypes.PyDLL(None).pause()


class FakeEncoder:
    """Satisfies runtime.tokenizer_pool.Encoder."""

    def encode_prompt(self, prompt: Prompt) -> Int32Array:
        if isinstance(prompt, ChatPrompt):
            text = prompt.messages[-1]["content"]
        elif isinstance(prompt, TextPrompt):
            text = prompt.text
        else:
            return np.array(prompt.token_ids, np.int32)
        if text == "refuse":
            raise PromptError("this prompt is refused", "prompt")
        if text == "panic":
            raise BaseException("as a Rust extension panics")
        if text == "exit tokenizer":
            raise SystemExit("a fault that no request may cause")
        act_on(text, "tokenizer")
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token_id:#04x}>" for token_id in token_ids]

    def encode_word(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def token_id(self, text: str) -> int | None:
        return {"<think>": ord("<"), "</think>": ord(">")}.get(text)


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step, done_s=2.5, took_s=0.01, predicted_s=None, decode_rows=1, decode_kv_tokens=30,
        prefill_budget=64, chunks=(Chunk(4, 0, 64),), running=2, waiting=1, free_pages=3,
        evictable_pages=2, evicted_pages=1, admitted=(Admitted(4, 70, 0),),
        refused=Refused(5, "rows"), retracted=(Retracted(3, "no page", 12, None),),
    )  # fmt: skip


@dataclass
class _Running:
    request: Request
    queued_s: float
    made: int = 0


@dataclass
class FakeEngine:
    """Satisfies runtime.engine_thread.ServedEngine; a step gives each request its next byte.

    Owned by the engine thread; tests read it.
    """

    running: dict[int, _Running] = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    before_step: Callable[[], None] = lambda: None
    closed: bool = False
    cached_pages: int = 7
    expiries: list[float] = field(default_factory=list)  # times at which it was asked to
    _ended: list[tuple[int, Finish]] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, request: Request) -> None:
        if request.prompt_ids[0] == 255:
            raise ValueError("it can never fit")
        self.running[request.id] = _Running(request, time.monotonic())

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)
        if self.running.pop(request_id, None) is not None:
            self._ended.append((request_id, Finish.ABORT))

    def stop_matched(self, request_id: int) -> None:
        self.stopped.append(request_id)
        self.running.pop(request_id, None)

    def expire(self, now_s: float) -> None:
        self.expiries.append(now_s)

    def flush_cache(self) -> int:
        freed, self.cached_pages = self.cached_pages, 0
        return freed

    def outline_cache(self) -> CacheOutline:
        return CacheOutline(16, 16 * self.cached_pages, 0, 0, ())

    def last_steps(self, count: int) -> tuple[StepRecord, ...]:
        return tuple(step_record(step) for step in range(10))[-count:]

    def step(self) -> StepOutput | None:
        self.before_step()
        rows = [(each.request.id, *self._next(each)) for each in self.running.values()]
        begun_s = time.monotonic()
        started = tuple(
            Started(each.request, 0, queued_s=each.queued_s, begun_s=begun_s)
            for each in self.running.values()
            if each.made == 1
        )
        rows += [(request_id, -1, finish) for request_id, finish in self._ended]
        self._ended = []
        for request_id, _, finish in rows:
            if finish is not Finish.NONE:
                self.running.pop(request_id, None)
        if not rows:
            return None
        ids, tokens, finishes = zip(*rows, strict=True)
        return StepOutput(
            1,
            np.array(ids, np.int64),
            np.array(tokens, np.int32),
            np.array(finishes, np.uint8),
            started,
            made_s=time.monotonic(),
        )

    @staticmethod
    def _next(each: _Running) -> tuple[int, Finish]:
        prompt = each.request.prompt_ids
        text = bytes(prompt.astype(np.uint8)).decode(errors="replace")
        act_on(text, "engine")
        if text in ("slow", "endless"):
            time.sleep(0.001)
        token = int(prompt[each.made % len(prompt)])
        each.made += 1
        ends = each.made >= each.request.params.max_new_tokens and text != "endless"
        return token, Finish.LENGTH if ends else Finish.NONE

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=0,
            free_pages=100 - len(self.running),
            cached_pages=0,
            evictable_pages=0,
            total_pages=100,
            page_size=1,
            steps=0,
            retractions=0,
            host_s=0.0,
        )

    def check_integrity(self) -> None:
        assert all(key == each.request.id for key, each in self.running.items())

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class FakeStepText:
    deltas: tuple[Delta, ...]
    stop_matched: tuple[int, ...]


class FakeTextMaker:
    """Satisfies runtime.detokenizer_thread.TextMaker; the byte "$" is everyone's stop string."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self._prompts: dict[int, str] = {}

    def on_step(self, output: StepOutput) -> FakeStepText:
        for started in output.started:
            prompt = bytes(started.request.prompt_ids.astype(np.uint8)).decode(errors="replace")
            self._made[started.request.id] = 0
            self._prompts[started.request.id] = prompt
        errors = dict(output.errors)
        deltas, stops = [], []
        for request_id, token, finish in zip(
            output.request_ids.tolist(), output.token_ids.tolist(), output.finishes.tolist(),
            strict=True,
        ):  # fmt: skip
            if finish in (Finish.ABORT, Finish.ERROR, Finish.TIMEOUT):
                error = errors.get(request_id)
                deltas.append(Delta(request_id, "", (), Finish(finish), 0, 0, error=error))
            if token < 0 or request_id not in self._made:
                continue
            act_on(self._prompts[request_id], "detokenizer")
            if self._prompts[request_id].endswith(" http"):
                deltas.append(_Fault(self._prompts[request_id]))  # type: ignore[arg-type]
            self._made[request_id] += 1
            end = Finish.STOP if token == ord("$") else Finish(finish)
            text = "" if token == ord("$") else chr(token)
            deltas.append(Delta(request_id, text, (token,), end, self._made[request_id], 0))
            if end is not Finish.NONE:
                del self._made[request_id]
                if not finish:
                    stops.append(request_id)
        return FakeStepText(tuple(deltas), tuple(stops))


class _Fault:
    """In a delta's place: the HTTP loop comes to grief over it."""

    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def request_id(self) -> int:
        act_on(self._text, "http")
        return -1


class FakeGrammars:
    """Satisfies runtime.lifecycle.GrammarSource: knows one pattern, and none else."""

    def __init__(self) -> None:
        self.closed = False

    def try_known(self, spec: GrammarSpec) -> None:
        """Nothing is kept."""

    def compile(self, spec: GrammarSpec) -> FakeGrammar:
        if spec == Regex("busy"):
            raise GrammarError("too many grammars are being tried", transient=True)
        if spec != Regex("known"):
            raise GrammarError("the grammar is not supported")
        return FakeGrammar(3)

    def close(self) -> None:
        self.closed = True


def fake_load(
    engine: FakeEngine | None = None,
    gate: threading.Event | None = None,
    error: Exception | None = None,
) -> Load:
    """Loading that ends once `gate` is open, or with `error`."""

    def load(progress: Progress) -> tuple[ServedEngine, Loaded]:
        while gate is not None and not gate.wait(0.01):
            progress("waiting for the gate", None)
        progress("loading bytes", 1.0)
        if error is not None:
            raise error
        return engine or FakeEngine(), Loaded(
            FACTS, FakeEncoder(), FakeTextMaker(), FakeGrammars()
        )  # fmt: skip

    return load
