"""Grammars tried in a process of their own, before the server itself compiles them.

Rules
- The library bounds most of what a grammar may cost, not all: a schema with a million items
  exhausts the memory, a chain of 20,000 rules the stack, and either would end the server.
- So a grammar is first compiled, and a few of its masks computed, in a fork that has limits on CPU
  time, memory and stack (`trial_process`). What passes there is compiled here: the library does the
  same work for the same text and limits.
- The process that forks loads nothing but the library and the vocabulary, is started with the
  server, and ends when its input is closed, which the kernel does if the server dies.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from engine.grammar.spec import GrammarError, GrammarLimits
from engine.grammar.vocabulary import Vocabulary

# Beyond a trial's CPU time: loading the vocabulary, and a machine that is busy with other things.
_PATIENCE_S: Final = 60.0
# How long a grammar waits for the trials of others, each of which is over after its CPU time.
_QUEUE_S: Final = 20.0
_ROOT: Final = Path(__file__).resolve().parents[2]


class Trial:
    """A process that tries grammars, one at a time. Safe from any thread."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        """Starts the process and does not wait for it."""
        self._vocabulary = vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = self._start()  # guarded by _lock

    def run(self, text: str) -> int:
        """The bytes that a compiled grammar takes. Raises GrammarError where it must not be."""
        if not self._lock.acquire(timeout=_QUEUE_S):
            raise GrammarError("too many grammars are being tried; try again", transient=True)
        try:
            answer = self._ask(text)
        except (OSError, ValueError) as error:  # no answer in time, or none at all; half a line
            self._stop()
            raise GrammarError("the grammar could not be tried; try again", transient=True) from (
                error
            )
        finally:
            self._lock.release()
        return self._judge(answer)

    def close(self) -> None:
        """Ends the process; a later `run` would start another."""
        with self._lock:
            self._stop()

    def _judge(self, answer: dict[str, Any]) -> int:
        if "refused" in answer:
            raise GrammarError(f"the grammar is not supported: {answer['refused']}")
        if "bytes" in answer:
            return int(answer["bytes"])
        if answer["signal"] == signal.SIGPROF:
            reason = f"takes more than {self._limits.trial_cpu_s} s to compile, which is the limit"
        elif answer["signal"] == signal.SIGSEGV:
            reason = "is nested too deeply"
        else:
            reason = f"takes more than {self._limits.trial_bytes} bytes, which is the limit"
        raise GrammarError(f"the grammar is too complex: it {reason}")

    def _ask(self, text: str) -> dict[str, Any]:
        limits = self._limits
        job = {
            "text": text,
            "cpu_s": limits.trial_cpu_s,
            "bytes": limits.trial_bytes,
            "tokens": limits.trial_tokens,
            "lexer_fuel": limits.lexer_fuel,
            "lexer_states": limits.lexer_states,
        }
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line_of(self._process.stdout.fileno()))
        return answer

    def _line_of(self, descriptor: int) -> bytes:
        """One line from the process. Raises TimeoutError, or BrokenPipeError where it has ended."""
        deadline = time.monotonic() + _PATIENCE_S + self._limits.trial_cpu_s
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("no answer from the process that tries grammars")
            part = os.read(descriptor, 4096)
            if not part:
                raise BrokenPipeError("the process that tries grammars has ended")
            line += part
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        file = os.memfd_create("vocabulary")
        header = json.dumps([self._vocabulary.width, self._vocabulary.eos_ids])
        with os.fdopen(file, "wb") as writer:
            writer.write(f"{header}\n{self._vocabulary.text}".encode())
            writer.flush()
            writer.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", "engine.grammar.trial_process", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(file,),
                cwd=_ROOT,
                start_new_session=True,  # Ctrl-C is for the server alone
            )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
