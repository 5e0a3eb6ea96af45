"""`--profile N`: a torch profiler's trace of the engine's first N steps that do something.

The trace is a file for Perfetto or chrome://tracing. It is taken on the engine thread, which it
slows down while it lasts; afterwards nothing of it is left.
"""

import logging
import time
from pathlib import Path
from typing import Any, cast

import torch

from engine.request import StepOutput
from runtime.engine_thread import ServedEngine

log = logging.getLogger(__name__)


def profiled(engine: ServedEngine, steps: int, folder: Path) -> ServedEngine:
    """The engine, whose next `steps` steps are traced into a file in `folder`."""
    return cast(ServedEngine, ProfiledEngine(engine, steps, folder))  # all else is the engine's own


class ProfiledEngine:
    """An engine whose next steps are traced. Owned by the engine thread."""

    def __init__(self, engine: ServedEngine, steps: int, folder: Path) -> None:
        """
        steps   to trace
        folder  where the file goes
        """
        self._engine = engine
        self._left = steps
        self._folder = folder
        self._profile: torch.profiler.profile | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> StepOutput | None:
        if not self._left or not self._engine.has_work:
            return self._engine.step()
        if self._profile is None:
            log.info("tracing %d steps", self._left)
            self._profile = torch.profiler.profile(activities=_activities(), acc_events=True)
            self._profile.start()
        output = self._engine.step()
        self._left -= 1
        if not self._left:
            self._write()
        return output

    def close(self) -> None:
        if self._profile is not None:
            self._write()
        self._engine.close()

    def _write(self) -> None:
        """A trace that cannot be written is told, and the server goes on."""
        profile, self._profile = self._profile, None
        assert profile is not None
        self._left = 0
        profile.stop()
        path = self._folder / f"plait-{time.strftime('%Y%m%d-%H%M%S')}.trace.json"
        profile.export_chrome_trace(str(path))
        if path.is_file():  # torch itself does not tell
            log.info("the trace is in %s: open it in https://ui.perfetto.dev", path)
        else:
            log.error("the trace cannot be written to %s", path)


def _activities() -> list[torch.profiler.ProfilerActivity]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return kinds
