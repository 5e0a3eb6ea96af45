"""Requests over time, made by chance from a seed: what the simulator serves.

Lengths are log-normal, as in public traces of chats; clients allow more tokens than answers have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.request import Int32Array, Request, SamplingParams

VOCAB: Final = 50_000
EOS: Final = 2  # below every id in a prompt


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests by arrival; `lengths[id]` is how many tokens the model would make of each."""

    requests: list[Request]
    lengths: dict[int, int]
    kv_tokens: int  # of the pool that is to serve it


@dataclass(frozen=True, slots=True)
class _Draft:
    arrived_s: float
    prompt: Int32Array
    length: int
    allowed: int
    priority: int = 0
    key: str = ""


def bursty_chat(seed: int, requests: int) -> Traffic:
    """Chats that arrive in bursts: for 3 of 15 seconds six times as many as else."""
    rng, drafts, now_s = np.random.default_rng(seed), [], 0.0
    while len(drafts) < requests:
        now_s += rng.exponential(1 / (24.0 if now_s % 15 < 3 else 4.0))
        prompt = _ids(rng, _log_normal(rng, 350, 0.9, 4000))
        drafts.append(_Draft(now_s, prompt, _log_normal(rng, 220, 0.8, 1024), 1024))
    return _traffic(drafts, kv_tokens=300_000)


def long_among_short(seed: int, requests: int) -> Traffic:
    """Chats, and a prompt of 8,000 tokens each second."""
    rng, drafts, now_s = np.random.default_rng(seed), [], 0.0
    next_long_s = 0.0
    while len(drafts) < requests:
        now_s += rng.exponential(1 / 5.0)
        if now_s >= next_long_s:
            drafts.append(_Draft(now_s, _ids(rng, 8000), 64, 256))
            next_long_s += 1.0
        prompt = _ids(rng, _log_normal(rng, 200, 0.6, 1000))
        drafts.append(_Draft(now_s, prompt, _log_normal(rng, 200, 0.6, 800), 1024))
    return _traffic(drafts, kv_tokens=600_000)


def shared_prompts(seed: int, requests: int) -> Traffic:
    """Of 60 applications with a system prompt of 3,000 tokens each; the cache holds a third."""
    rng, drafts, now_s = np.random.default_rng(seed), [], 0.0
    systems = [_ids(rng, 3000) for _ in range(60)]
    while len(drafts) < requests:
        now_s += rng.exponential(1 / 14.0)
        application = int(rng.integers(60))
        prompt = np.concatenate([systems[application], _ids(rng, _log_normal(rng, 150, 0.6, 800))])
        length = _log_normal(rng, 150, 0.7, 512)
        drafts.append(_Draft(now_s, prompt, length, 512, application % 3, str(application)))
    return _traffic(drafts, kv_tokens=90_000)


def memory_short(seed: int, requests: int) -> Traffic:
    """More answers than the pool has room for: short ones, until most of them suddenly are long.

    What is expected of outputs is then wrong, which retraction has to make up for.
    """
    rng = np.random.default_rng(seed)
    drafts = []
    for number in range(requests):
        prompt = _ids(rng, _log_normal(rng, 250, 0.5, 1500))
        is_long = number >= requests // 2 and rng.random() < 0.8
        length = _log_normal(rng, 1500 if is_long else 100, 0.4, 2048)
        drafts.append(_Draft(0.02 * number, prompt, length, 2048, int(rng.integers(3))))
    return _traffic(drafts, kv_tokens=40_000)


WORKLOADS: Final[dict[str, Callable[[int, int], Traffic]]] = {
    "bursty chat": bursty_chat,
    "long among short": long_among_short,
    "shared prompts": shared_prompts,
    "memory short": memory_short,
}


def _traffic(drafts: list[_Draft], kv_tokens: int) -> Traffic:
    requests = [
        Request(
            number, draft.prompt,
            SamplingParams(draft.allowed, priority=draft.priority, routing_key=draft.key),
            seed=number, arrived_s=draft.arrived_s,
        )
        for number, draft in enumerate(drafts)
    ]  # fmt: skip
    return Traffic(requests, {n: draft.length for n, draft in enumerate(drafts)}, kv_tokens)


def _ids(rng: np.random.Generator, count: int) -> Int32Array:
    return rng.integers(EOS + 1, VOCAB, count).astype(np.int32)


def _log_normal(rng: np.random.Generator, median: int, sigma: float, most: int) -> int:
    return int(min(most, max(1, rng.lognormal(np.log(median), sigma))))
