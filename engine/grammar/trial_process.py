"""The process in which grammars are tried: `python -m engine.grammar.trial_process FD`.

Reads the vocabulary from the file FD, then jobs from standard input and answers each on standard
output, one JSON value a line. Every job runs in a fork with limits on its memory and CPU time, so
whatever it does ends there; this process has one thread, and lives until its input is closed.

The library's own limits and the state after a grammar are the same here and in the server: what
passed here takes the same time, memory and stack there.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.grammar.library import LibraryError, allowed_ids, check, compile_text, fill
from engine.grammar.native import llguidance
from engine.grammar.vocabulary import load

# Less than any thread of the server has (2 MiB at the least), so a stack that suffices here
# suffices there.
_STACK_BYTES: Final = 1_048_576


def main() -> None:
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        width, eos_ids = json.loads(file.readline())
        vocabulary = load(file.read(), width, eos_ids)
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            _run_and_exit(vocabulary, json.loads(line))
        _, status = os.waitpid(child, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code != 0:
            _answer({"signal": -exit_code})


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _run_and_exit(vocabulary: llguidance.LLTokenizer, job: dict[str, Any]) -> None:
    """One job in a fork; leaves without an answer, and a code other than 0, where it fails."""
    _limit(job["bytes"], job["cpu_s"])
    threading.stack_size(_STACK_BYTES)
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(_try(vocabulary, job)))
    thread.start()
    thread.join()
    if answers:
        _answer(answers[0])
    os._exit(0 if answers else 1)


def _limit(extra_bytes: int, cpu_s: float) -> None:
    """At the limit of memory the library aborts, at that of time the kernel ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _own_bytes("VmSize") + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _own_bytes(field: str) -> int:
    """One of the sizes in /proc/self/status, which are in KiB."""
    line = next(line for line in Path("/proc/self/status").open() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _try(vocabulary: llguidance.LLTokenizer, job: dict[str, Any]) -> dict[str, Any]:
    """Compiles, then follows the masks for a few tokens, each chosen evenly among those allowed."""
    before = _own_bytes("RssAnon")
    row = np.zeros(-(-vocabulary.vocab_size // 32), np.int32)
    chance = random.Random(0)
    try:
        matcher = compile_text(vocabulary, job["text"], job["lexer_fuel"], job["lexer_states"])
        for _ in range(job["tokens"]):
            fill(matcher, row)
            matcher.consume_token(int(chance.choice(allowed_ids(row))))
            check(matcher)
            if matcher.is_stopped():
                break
    except LibraryError as error:
        return {"refused": str(error)}
    grown = _own_bytes("RssAnon") - before
    del matcher  # taking a deep structure apart needs stack too
    return {"bytes": max(grown, 0)}


if __name__ == "__main__":
    main()
