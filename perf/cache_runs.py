"""Conversations on an engine, without a server: what a prefix cache makes of them.

Knows neither which settings are compared nor for how long.
"""

import dataclasses
import time
from typing import Any, Final

import numpy as np

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.kv_cache import page_bytes
from engine.load import load_model
from engine.request import Int32Array, Request, SamplingParams, StepOutput


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How large the workloads are; lengths in tokens."""

    clients: int
    turns: int
    new_in: int
    new_out: int
    system: int
    page_size: int
    copy_steps: int  # of a measurement of copies
    most_copied: int  # pages of such a step

    @property
    def context(self) -> int:
        """Of the longest request, in whole pages."""
        longest = self.system + self.turns * (self.new_in + self.new_out)
        return -(-longest // self.page_size) * self.page_size

    @property
    def conversation_tokens(self) -> int:
        """All that the conversations come to."""
        return self.clients * self.turns * (self.new_in + self.new_out)


class Clients:
    """Conversations with an engine, and their times. Owned by the caller.

    histories  what each client's conversation begins with
    ends       what each says, one after the other; every prompt is all that was said before, too
    out        tokens of an answer
    """

    def __init__(
        self,
        engine: Engine,
        histories: list[Int32Array],
        ends: list[list[Int32Array]],
        out: int,
    ) -> None:
        self._engine, self._out = engine, out
        self._said = list(histories)
        self._left = [list(client) for client in ends]
        self._begun: list[tuple[int, float]] = []  # by request id: whose it is, since when
        self._answers: dict[int, list[int]] = {}  # of requests that are not done
        self._ttft_s: list[float] = []
        self._cached = self._from_host = self._prompt_tokens = self._output_tokens = 0

    def run(self, until_s: float) -> dict[str, Any]:
        """Figures, once all are answered, or of what was until `time.perf_counter()` was so far."""
        begun_s = time.perf_counter()
        for client in range(len(self._said)):
            self._speak(client)
        while self._engine.has_work and time.perf_counter() < until_s:
            output = self._engine.step()
            if output is not None:
                self._take(output)
        wall_s, is_cut = time.perf_counter() - begun_s, self._engine.has_work
        while self._engine.has_work:
            for number in self._answers:
                self._engine.abort(number)
            self._engine.step()
        return {"is_cut": is_cut, **self._figures(wall_s)}

    def _speak(self, client: int) -> None:
        prompt = np.concatenate([self._said[client], self._left[client].pop(0)])
        self._said[client] = prompt
        number = len(self._begun)
        params = SamplingParams(max_new_tokens=self._out, temperature=0.0, ignore_eos=True)
        self._begun.append((client, time.perf_counter()))
        self._answers[number] = []
        self._engine.submit(Request(number, prompt, params, seed=0))

    def _take(self, output: StepOutput) -> None:
        now_s = time.perf_counter()
        for started in output.started:
            self._ttft_s.append(now_s - self._begun[started.request.id][1])
            self._prompt_tokens += len(started.request.prompt_ids)
            self._cached += started.cached_tokens
            self._from_host += started.host_tokens
        ids, tokens = output.request_ids.tolist(), output.token_ids.tolist()
        self._output_tokens += len(tokens)
        for number, token, finish in zip(ids, tokens, output.finishes.tolist(), strict=True):
            self._answers[number].append(token)
            if finish:
                client, _ = self._begun[number]
                answer = np.array(self._answers.pop(number), np.int32)
                self._said[client] = np.concatenate([self._said[client], answer])
                if self._left[client]:
                    self._speak(client)

    def _figures(self, wall_s: float) -> dict[str, Any]:
        """Of all that began to be answered; None where nothing was."""
        stats, prompt_tokens = self._engine.stats(), max(1, self._prompt_tokens)
        found = self._ttft_s
        return {
            "wall_s": wall_s,
            "requests": len(found),
            "ttft_p50_ms": 1e3 * float(np.median(found)) if found else None,
            "ttft_p99_ms": 1e3 * float(np.quantile(found, 0.99)) if found else None,
            "output_tokens_per_s": self._output_tokens / wall_s,
            "prompt_tokens_per_s": self._prompt_tokens / wall_s,
            "cached_share": self._cached / prompt_tokens,
            "from_host_share": self._from_host / prompt_tokens,
            "retractions": stats.retractions,
            "steps": stats.steps,
            "host_pages": stats.host._asdict(),
        }


class Bench:
    """A model, and engines around it. Owned by the caller."""

    def __init__(self, config: EngineConfig, size: Size) -> None:
        self.size = size
        self._config = config
        _, self.model = load_model(
            config.model, device=config.device, dtype=config.dtype, load_format="dummy"
        )
        self._vocabulary = min(10_000, self.model.config.vocab_size)

    @property
    def page_bytes(self) -> int:
        return page_bytes(self.model.config, self._config.page_size, self.model.dtype)

    def engine(self, **settings: Any) -> Engine:
        return assemble_engine(dataclasses.replace(self._config, **settings), self.model)

    def shared_prefix(self, until_s: float, **settings: Any) -> dict[str, Any]:
        """Everyone begins with one system prompt; all but the first find it cached."""
        size, rng = self.size, np.random.default_rng(1)
        system = self._ids(rng, size.system)
        ends = [[self._ids(rng, size.new_in)] for _ in range(size.clients)]
        return self._run([system] * size.clients, ends, until_s, settings)

    def conversations(
        self, until_s: float, *, after_system: bool = False, **settings: Any
    ) -> dict[str, Any]:
        """Every client has a history of its own, which may begin with one system prompt."""
        size, rng = self.size, np.random.default_rng(2)
        begin = self._ids(rng, size.system) if after_system else _NOTHING
        ends = [
            [self._ids(rng, size.new_in) for _ in range(size.turns)] for _ in range(size.clients)
        ]
        return self._run([begin] * size.clients, ends, until_s, settings)

    def _run(
        self,
        histories: list[Int32Array],
        ends: list[list[Int32Array]],
        until_s: float,
        settings: dict[str, Any],
    ) -> dict[str, Any]:
        begun_s = time.perf_counter()
        engine = self.engine(**settings)
        self._warm_up(engine)
        ready_s = time.perf_counter() - begun_s
        figures = Clients(engine, histories, ends, self.size.new_out).run(until_s)
        engine.check_integrity()
        engine.close()
        return {"settings": settings, "ready_s": ready_s, **figures}

    def _warm_up(self, engine: Engine) -> None:
        """Whatever is set up with the first steps."""
        rng, clients = np.random.default_rng(0), self.size.clients
        prompts = [[self._ids(rng, self.size.new_in)] for _ in range(clients)]
        Clients(engine, [_NOTHING] * clients, prompts, 8).run(until_s=float("inf"))
        engine.flush_cache()

    def _ids(self, rng: np.random.Generator, count: int) -> Int32Array:
        return rng.integers(0, self._vocabulary, count).astype(np.int32)


_NOTHING: Final = np.empty(0, np.int32)
