"""A server whose engine only replays text, to measure everything around an engine.

    python -m perf.frontend_server --step-ms 10

Tokenizer (the default model's), detokenizer, HTTP and their threads are the real ones.
Each step gives every running request its next token, `--step-ms` apart: a steady engine.
"""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import numpy as np

from engine.cache_outline import CacheOutline
from engine.config import EngineConfig
from engine.core import EngineStats
from engine.detokenizer import Detokenizer
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.request import CompiledGrammar, Finish, Int32Array, Request, Started, StepOutput
from engine.step_trace import StepRecord
from engine.tokenizer import Tokenizer
from httpd.service import ModelCard
from runtime import serve
from runtime.config import ServerConfig
from runtime.engine_thread import Load, Loaded, Progress, ServedEngine
from runtime.gil import restart_without_gil
from runtime.messages import ModelFacts
from runtime.setup.model import default_folder

TEXT: Final = (
    "A server that streams many answers at once has little time for each token: it turns ids into "
    "text, looks for stop strings, writes an event and wakes a socket. 今天天气如何？ Ça va bien. "
)
MAX_MODEL_LEN: Final = 8192


class ReplayEngine:
    """Gives every request the same text, over and over. Owned by the engine thread."""

    def __init__(self, text_ids: list[int], step_s: float) -> None:
        self._text_ids, self._step_s = text_ids, step_s
        self._running: dict[int, tuple[Request, Iterator[int]]] = {}
        self._made: dict[int, int] = {}
        self._new: list[tuple[Request, float]] = []  # and when it came
        self._aborted: list[int] = []
        self._next_s = 0.0
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._aborted)

    def submit(self, request: Request) -> None:
        self._running[request.id] = request, itertools.cycle(self._text_ids)
        self._made[request.id] = 0
        self._new.append((request, time.monotonic()))

    def abort(self, request_id: int) -> None:
        if self._running.pop(request_id, None) is not None:
            self._aborted.append(request_id)

    def stop_matched(self, request_id: int) -> None:
        self._running.pop(request_id, None)

    def flush_cache(self) -> int:
        return 0

    def outline_cache(self) -> CacheOutline:
        return CacheOutline(1, 0, 0, 0, ())

    def expire(self, now_s: float) -> None:
        """Nobody waits here."""

    def step(self) -> StepOutput | None:
        wait_s = self._next_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        self._next_s = max(self._next_s + self._step_s, time.monotonic())
        self.steps += 1
        ids = [*self._running, *self._aborted]
        tokens = [next(text) for _, text in self._running.values()] + [-1] * len(self._aborted)
        finishes = [self._finish(request_id) for request_id in self._running]
        finishes += [Finish.ABORT] * len(self._aborted)
        now_s = time.monotonic()
        started = tuple(
            Started(request, 0, queued_s=came_s, begun_s=now_s)
            for request, came_s in self._new
            if request.id in self._running
        )
        self._new, self._aborted = [], []
        for request_id, finish in zip(ids, finishes, strict=True):
            if finish:
                self._running.pop(request_id, None)
                self._made.pop(request_id, None)
        arrays = np.array(ids, np.int64), np.array(tokens, np.int32), np.array(finishes, np.uint8)
        return StepOutput(self.steps, *arrays, started, made_s=time.monotonic())

    def _finish(self, request_id: int) -> Finish:
        self._made[request_id] += 1
        limit = self._running[request_id][0].params.max_new_tokens
        return Finish.LENGTH if self._made[request_id] >= limit else Finish.NONE

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running), waiting=0, free_pages=1, cached_pages=0, evictable_pages=0,
            total_pages=1, page_size=64, steps=self.steps, retractions=0, host_s=0.0,
        )  # fmt: skip

    def last_steps(self, count: int) -> tuple[StepRecord, ...]:
        return ()

    def check_integrity(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to give back."""


class NoGrammars:
    """Satisfies runtime.lifecycle.GrammarSource."""

    def try_known(self, spec: GrammarSpec) -> None:
        """Nothing is kept."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        raise GrammarError("a replayed text is in no grammar")

    def close(self) -> None:
        """Nothing was started."""


def load_replay(folder: Path, step_s: float) -> Load:
    """Loading for `runtime.serve.run`."""

    def load(progress: Progress) -> tuple[ServedEngine, Loaded]:
        progress("loading the tokenizer", None)
        tokenizer = Tokenizer.load(folder)
        text_ids: Int32Array = np.array(tokenizer.backend.encode(TEXT).ids, np.int32)
        card = ModelCard(
            id="replay", created=1, max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size,
            has_chat_template=True,
        )  # fmt: skip
        facts = ModelFacts(card, kv_tokens=1 << 20, device="none", dtype="text")
        engine = ReplayEngine(text_ids.tolist(), step_s)
        return engine, Loaded(facts, tokenizer, Detokenizer(tokenizer), NoGrammars())

    return load


@click.command()
@click.option("--step-ms", default=10.0, show_default=True, help="0: as fast as it is taken.")
@click.option("--http-loops", default=1, show_default=True)
@click.option("--max-running", default=1024, show_default=True)
@click.option("--port", default=0, show_default=True)
def main(step_ms: float, http_loops: int, max_running: int, port: int) -> None:
    """Serves replayed text."""
    restart_without_gil()
    folder = default_folder()
    engine = EngineConfig(folder, max_running=max_running)
    config = ServerConfig(engine, port=port, http_loops=http_loops)
    code, all_ended = serve.run(config, load_replay(folder, step_ms / 1e3))
    if not all_ended:
        os._exit(code)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
