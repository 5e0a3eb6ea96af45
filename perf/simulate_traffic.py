"""Requests over time, made by chance from a seed: what the simulator serves.

Lengths are log-normal, as in public traces of chats; clients allow more tokens than answers have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from engine.request import Int32Array, Request, SamplingParams

VOCAB: Final = 50_000
LONG: Final = 8000  # tokens of a prompt that comes among short ones
EOS: Final = 2  # below every id in a prompt


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests by arrival; `lengths[id]` is how many tokens the model would make of each.

    `after[id]` is (another's id, pause in seconds): the request comes so long after the end of that
    one, and its `arrived_s` is only where it stands in the list.
    """

    requests: list[Request]
    lengths: dict[int, int]
    kv_tokens: int  # of the pool that is to serve it
    after: Mapping[int, tuple[int, float]] = field(default_factory=dict)

    def faster(self, times: float) -> "Traffic":
        """The same requests in less time, those that follow others after shorter pauses."""
        requests = [replace(each, arrived_s=each.arrived_s / times) for each in self.requests]
        after = {n: (leader, pause_s / times) for n, (leader, pause_s) in self.after.items()}
        return replace(self, requests=requests, after=after)


@dataclass(frozen=True, slots=True)
class Draft:
    """A request to come."""

    arrived_s: float
    prompt: Int32Array
    length: int
    allowed: int
    priority: int = 0
    key: str = ""
    after: tuple[int, float] | None = None  # as in Traffic.after, by place in the list of drafts


def bursty_chat(seed: int, requests: int) -> Traffic:
    """Chats that arrive in bursts: for 3 of 15 seconds six times as many as else."""
    rng, now_s = np.random.default_rng(seed), 0.0
    drafts: list[Draft] = []
    while len(drafts) < requests:
        now_s += rng.exponential(1 / (24.0 if now_s % 15 < 3 else 4.0))
        prompt = ids(rng, log_normal(rng, 350, 0.9, 4000))
        drafts.append(Draft(now_s, prompt, log_normal(rng, 220, 0.8, 1024), 1024))
    return traffic_of(drafts, kv_tokens=300_000)


def long_among_short(seed: int, requests: int) -> Traffic:
    """Chats, and a prompt of 8,000 tokens each second."""
    rng, now_s = np.random.default_rng(seed), 0.0
    drafts: list[Draft] = []
    next_long_s = 0.0
    while len(drafts) < requests:
        now_s += rng.exponential(1 / 5.0)
        if now_s >= next_long_s:
            drafts.append(Draft(now_s, ids(rng, LONG), 64, 256))
            next_long_s += 1.0
        prompt = ids(rng, log_normal(rng, 200, 0.6, 1000))
        drafts.append(Draft(now_s, prompt, log_normal(rng, 200, 0.6, 800), 1024))
    return traffic_of(drafts, kv_tokens=600_000)


def short_alone(seed: int, requests: int) -> Traffic:
    """The same chats, without those prompts."""
    traffic = long_among_short(seed, requests)
    kept = [each for each in traffic.requests if len(each.prompt_ids) < LONG]
    return replace(traffic, requests=kept)


def shared_prompts(seed: int, requests: int) -> Traffic:
    """Of 60 applications with a system prompt of 3,000 tokens each; the cache holds a third."""
    rng, now_s = np.random.default_rng(seed), 0.0
    drafts: list[Draft] = []
    systems = [ids(rng, 3000) for _ in range(60)]
    while len(drafts) < requests:
        now_s += rng.exponential(1 / 14.0)
        application = int(rng.integers(60))
        prompt = np.concatenate([systems[application], ids(rng, log_normal(rng, 150, 0.6, 800))])
        length = log_normal(rng, 150, 0.7, 512)
        drafts.append(Draft(now_s, prompt, length, 512, application % 3, str(application)))
    return traffic_of(drafts, kv_tokens=90_000)


def memory_short(seed: int, requests: int) -> Traffic:
    """More answers than the pool has room for: short ones, until most of them suddenly are long.

    What is expected of outputs is then wrong, which retraction has to make up for.
    """
    rng = np.random.default_rng(seed)
    drafts = []
    for number in range(requests):
        prompt = ids(rng, log_normal(rng, 250, 0.5, 1500))
        is_long = number >= requests // 2 and rng.random() < 0.8
        length = log_normal(rng, 1500 if is_long else 100, 0.4, 2048)
        drafts.append(Draft(0.02 * number, prompt, length, 2048, int(rng.integers(3))))
    return traffic_of(drafts, kv_tokens=40_000)


def traffic_of(drafts: list[Draft], kv_tokens: int) -> Traffic:
    """Requests with the numbers that they have in the list."""
    requests = [
        Request(
            number, draft.prompt,
            SamplingParams(draft.allowed, priority=draft.priority, routing_key=draft.key),
            seed=number, arrived_s=draft.arrived_s,
        )
        for number, draft in enumerate(drafts)
    ]  # fmt: skip
    lengths = {number: draft.length for number, draft in enumerate(drafts)}
    after = {n: draft.after for n, draft in enumerate(drafts) if draft.after is not None}
    return Traffic(requests, lengths, kv_tokens, after)


def ids(rng: np.random.Generator, count: int) -> Int32Array:
    """[count] of any tokens but EOS."""
    return rng.integers(EOS + 1, VOCAB, count).astype(np.int32)


def log_normal(rng: np.random.Generator, median: int, sigma: float, most: int) -> int:
    """A length, 1 at least."""
    return int(min(most, max(1, rng.lognormal(np.log(median), sigma))))
