"""All threads of one server, and the order in which they start and end.

Start: the HTTP loops, so that /health answers; the engine, which loads; then detokenizer and
tokenizers; READY.
End:   the HTTP loops (no request is left then), tokenizers, engine, detokenizer: each after those
that send to it.

Knows neither what the engine is nor how it is loaded: see loading.py.
"""

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from httpd.app import APIS, create_app
from httpd.service import State
from httpd.settings import HttpSettings
from httpd.traces import Traces
from runtime.capacity.estimate import Asked
from runtime.capacity.report import Capacity
from runtime.config import ServerConfig
from runtime.control import ServerControl
from runtime.detokenizer_thread import DetokenizerLoop
from runtime.engine_thread import EngineLoop, Load, Loaded, Progress
from runtime.http_thread import HttpLoop, hypercorn_config
from runtime.inbox import Inbox
from runtime.insight import ServerInsight
from runtime.lifecycle import Lifecycle, Outcome
from runtime.messages import ModelFacts
from runtime.monitor import Watchdog, all_stacks
from runtime.monitor_thread import MonitorLoop
from runtime.queue_limit import QueueCounts, QueueLimit
from runtime.ranks.leader import LeaderLoop
from runtime.ranks.links import Link
from runtime.request_log import RequestLog
from runtime.rings import Rings
from runtime.service import ThreadedService
from runtime.telemetry.thread import Telemetry
from runtime.tokenizer_pool import TokenizerLoop
from runtime.worker import TICK_S, Worker

log = logging.getLogger(__name__)

_JOIN_S: Final = 10.0
_FAILED_HTTP_S: Final = 4.0  # for open streams to get their error event
_FAILED_JOIN_S: Final = 1.0
_FAILED_RANKS_S: Final = 3.5  # for the other ranks to end, or to be killed: meanwhile
_LAST_RESORT_S: Final = 8.0  # more than all of it


class Server:
    """One server, from its listening socket to its exit code. Owned by the main thread."""

    def __init__(
        self,
        config: ServerConfig,
        listening: socket.socket,
        load: Load,
        *,
        version: str,
        progress: Progress,
        on_ready: Callable[[ModelFacts], None],
        capacity: Asked | None = None,
        on_capacity: Callable[[Capacity], None] = lambda _report: None,
        followers: Sequence[Link] = (),
        telemetry: Telemetry | None = None,
    ) -> None:
        """
        listening    taken over
        load         called on the engine thread, as is `progress`
        on_ready     called on the main thread once the API answers
        capacity     what the report is about; None: the machine alone
        on_capacity  called with the report on the monitor thread, while the model is loaded
        followers    links to the other ranks that serve the model, taken over
        telemetry    gets every trace, taken over; None: nobody does
        """
        self._config = config
        self._on_ready = on_ready
        self._telemetry = telemetry
        self._lifecycle = Lifecycle()
        self._rings = Rings(config)
        for wakeup in self._rings.wakeups:
            self._lifecycle.subscribe(wakeup)
        self._inbox = Inbox(self._rings.main, [self._rings.loaded.receiver])
        self._watchdog = Watchdog(self._lifecycle, config.watchdog_s)
        self._http = [
            self._worker(f"http-{index}", loop.run, ends_first=True)
            for index, loop in enumerate(self._http_loops(listening, version))
        ]
        self._engine = self._worker(
            "engine", EngineLoop(load, progress, self._rings.of_engine()).run
        )
        monitor = MonitorLoop(self._rings.of_monitor(), capacity, on_capacity)
        self._monitor = self._worker("monitor", monitor.run)
        self._ranks = [self._ranks_worker(followers)] if followers else []
        self._tokenizers: list[Worker] = []  # and the detokenizer: started once the model is there
        self._detokenizers: list[Worker] = []
        self._loaded: Loaded | None = None
        self._signals = 0

    def _http_loops(self, listening: socket.socket, version: str) -> list[HttpLoop]:
        config, rings = self._config, self._rings
        loops = range(config.http_loops)
        counts, connections = QueueCounts(len(loops)), [0] * len(loops)
        settings = HttpSettings(
            version=version,
            max_body_bytes=config.max_body_bytes,
            request_timeout_s=config.request_timeout_s,
            max_choices=config.max_choices,
            cors_origins=config.cors_origins,
            has_page=config.page,
            isolates_keys=config.cache_isolation == "key",
            access=config.access,
        )
        logs = [RequestLog() for _ in loops]
        telemetry = self._telemetry
        traces = [
            Traces(frozenset(APIS), None if telemetry is None else telemetry.on_end(index))
            for index in loops
        ]

        def http_loop(index: int) -> HttpLoop:
            limit = QueueLimit(config.max_requests, config.max_queued_tokens, counts, index)
            service = ThreadedService(
                self._lifecycle, rings.of_service(index), limit, logs[index], loops=len(loops)
            )
            control = ServerControl(
                self._lifecycle, rings.of_control(index), service,
                keeps_steps=config.engine.trace_steps > 0,
            )  # fmt: skip
            insight = ServerInsight(
                self._lifecycle, rings.of_insight(), logs, traces, limit, version=version,
                max_running=config.engine.max_running, max_alive=config.max_requests,
            )  # fmt: skip
            return HttpLoop(
                create_app(service, settings, control, insight, traces[index]),
                hypercorn_config(config),
                listening.dup(),
                service,
                control,
                rings.of_http(index),
                self._lifecycle,
                connections=connections,
                index=index,
                stall_timeout_s=config.stall_timeout_s,
                drain_timeout_s=config.drain_timeout_s,
            )

        made = [http_loop(index) for index in loops]
        listening.close()  # each loop has its own now
        return made

    def _ranks_worker(self, followers: Sequence[Link]) -> Worker:
        loop = LeaderLoop(followers, self._lifecycle, self._rings.ranks)
        return self._worker("ranks", loop.run, ends_first=True)

    def _worker(self, name: str, body: Callable[..., None], *, ends_first: bool = False) -> Worker:
        return Worker(name, body, self._lifecycle, ends_first=ends_first)

    # The main thread's life

    def run(self) -> Outcome:
        """Serves until a signal or a failure ends it."""
        for worker in (*self._http, self._monitor, self._engine, *self._ranks):
            worker.start()
        if self._telemetry is not None:
            self._telemetry.start()
        while True:
            self._inbox.wait(TICK_S)
            self._watchdog.check(self._workers)
            if self._signals:
                self._lifecycle.drain()
            if self._lifecycle.state is State.FAILED:
                return self._end_failed()
            is_draining = self._lifecycle.state is State.DRAINING
            if is_draining and not any(http.is_alive for http in self._http):
                return self._end()
            if self._lifecycle.state is State.LOADING:
                self._open_when_loaded()

    def on_signal(self, signal_number: int) -> None:
        """A wish to end: the first drains, the second ends at once. Called by a signal handler."""
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + signal_number)
        self._rings.main.signal()

    def _open_when_loaded(self) -> None:
        loaded = self._rings.loaded.receiver.try_pop()
        if loaded is not None:
            self._loaded = loaded
            self._rings.facts.value = loaded.facts
            self._start_text_workers(loaded)
        if self._loaded is None or any(w.pulse.last_beat_s is None for w in self._workers):
            return
        gc.collect()
        gc.freeze()  # what lives as long as the server is never looked at again
        facts, tokenizer = self._loaded.facts, self._loaded.tokenizer
        if self._lifecycle.ready(facts.card, self._loaded.grammars, tokenizer):
            self._on_ready(facts)

    def _start_text_workers(self, loaded: Loaded) -> None:
        rings, card = self._rings, loaded.facts.card
        for index in range(self._config.tokenizer_threads):
            loop = TokenizerLoop(
                loaded.tokenizer, card.max_model_len, card.vocab_size, rings.of_tokenizer(index)
            )
            self._tokenizers.append(self._worker(f"tokenizer-{index}", loop.run))
        detokenizer = DetokenizerLoop(loaded.detokenizer, rings.of_detokenizer())
        self._detokenizers.append(self._worker("detokenizer", detokenizer.run))
        for worker in [*self._detokenizers, *self._tokenizers]:
            worker.start()

    @property
    def _workers(self) -> list[Worker]:
        """Those started so far, in the order in which they end."""
        text, ranks = self._tokenizers, self._ranks
        return [*self._http, self._monitor, *text, self._engine, *self._detokenizers, *ranks]

    # The end

    def _end(self) -> Outcome:
        self._lifecycle.stop()
        self._watchdog.arm(_JOIN_S + _LAST_RESORT_S)
        is_loading = self._loaded is None  # which cannot be interrupted everywhere
        left = self._join(self._workers, _FAILED_JOIN_S if is_loading else _JOIN_S)
        if left and not is_loading:
            log.critical("threads that did not end: %s\n%s", ", ".join(left), all_stacks())
            return Outcome(1, all_ended=False)
        if self._lifecycle.state is State.FAILED:
            return self._end_failed()
        log.info("ended%s", " while loading" if is_loading else "")
        return Outcome(0, all_ended=self._close(left))

    def _end_failed(self) -> Outcome:
        failure = self._lifecycle.failure
        assert failure is not None
        self._watchdog.arm(_LAST_RESORT_S)
        self._join([w for w in self._http if w.name != failure.thread], _FAILED_HTTP_S)
        if failure.is_hang:  # last, once clients were told: it may itself hang
            log.critical("all threads:\n%s", all_stacks())
        self._lifecycle.stop()
        for worker in self._ranks:
            worker.join(_FAILED_RANKS_S)
        left = self._join(self._workers, _FAILED_JOIN_S)
        log.critical("the server ends; %s thread: %s", failure.thread, failure.cause)
        return Outcome(1, all_ended=self._close(left))

    @staticmethod
    def _join(workers: list[Worker], timeout_s: float) -> list[str]:
        """Names of those whose threads still run."""
        deadline = time.monotonic() + timeout_s
        return [w.name for w in workers if not w.join(max(0.0, deadline - time.monotonic()))]

    def _close(self, left: list[str]) -> bool:
        self._watchdog.disarm()
        if self._telemetry is not None:
            self._telemetry.close()  # where it hangs, it ends with the process
        if self._loaded is not None:
            self._loaded.grammars.close()
        if not left:  # whoever still runs may use them
            for wakeup in self._rings.wakeups:
                wakeup.close()
        return not left
