"""Traffic that is not just chats: agents' sessions, and requests that are out to do harm.

As in perf/simulate_traffic.py, all by chance from a seed.
"""

import numpy as np

from engine.request import Int32Array
from perf.simulate_traffic import EOS, Draft, Traffic, ids, log_normal, traffic_of


def agent_sessions(seed: int, requests: int) -> Traffic:
    """Agents in sessions of 8 turns: each prompt is all before it and what a tool has returned.

    4 kinds of agents share their system prompts; tools take 2 s on average. The pool holds about
    half of what the sessions under way have in it.
    """
    rng, drafts = np.random.default_rng(seed), list[Draft]()
    systems = [ids(rng, 2000) for _ in range(4)]
    begins_s = 0.0
    while len(drafts) < requests:
        begins_s += rng.exponential(1.2)
        begins = systems[int(rng.integers(4))]
        talk(rng, drafts, begins_s, begins, 8, asked=(400, 0.9, 3000), pause_s=2.0)
    return traffic_of(drafts, kv_tokens=100_000)


def parked_chats(seed: int, requests: int) -> Traffic:
    """People who talk about a document each, 6 turns, and think for 15 s on average in between.

    The pool holds a tenth of what all chats come to, where that is room for one at least.
    """
    rng, drafts = np.random.default_rng(seed), list[Draft]()
    begins_s, tokens = 0.0, 0
    while len(drafts) < requests:
        begins_s += rng.exponential(0.5)
        document = ids(rng, log_normal(rng, 2500, 0.3, 5000))
        tokens += talk(rng, drafts, begins_s, document, 6, asked=(250, 0.6, 800), pause_s=15.0)
    return traffic_of(drafts, kv_tokens=max(tokens // 10, 16_384))


def talk(
    rng: np.random.Generator, drafts: list[Draft], begins_s: float, prompt: Int32Array, turns: int,
    *, asked: tuple[int, float, int], pause_s: float,
) -> int:  # fmt: skip
    """Drafts a session whose every turn has all before it; how many tokens it comes to.

    asked    median, spread and most of what a turn asks, as `log_normal` takes them
    pause_s  between an answer and the next turn, on average
    """
    after: tuple[int, float] | None = None
    for _ in range(turns):
        prompt = np.concatenate([prompt, ids(rng, log_normal(rng, *asked))])
        length = log_normal(rng, 120, 0.6, 400)
        drafts.append(Draft(begins_s, prompt, length, 512, after=after))
        after = len(drafts) - 1, float(rng.exponential(pause_s))
        prompt = np.concatenate([prompt, answer(length)])
    return len(prompt)


def answer(length: int) -> Int32Array:
    """The tokens that the simulator makes."""
    return np.array([EOS + 1] * (length - 1) + [EOS], np.int32)


def cache_thrashing(seed: int, requests: int) -> Traffic:
    """Beginnings asked for in turn, of which the cache holds all but a few: each is evicted just
    before it comes again.
    """
    rng = np.random.default_rng(seed)
    beginnings = [ids(rng, 2000) for _ in range(40)]
    drafts = []
    for number in range(requests):
        prompt = np.concatenate([beginnings[number % 40], ids(rng, 50)])
        drafts.append(Draft(number / 6.0, prompt, log_normal(rng, 100, 0.5, 300), 512))
    return traffic_of(drafts, kv_tokens=72_000)


def giant_prompts(seed: int, requests: int) -> Traffic:
    """Chats, and three prompts of nearly the whole context at once every 10 seconds."""
    rng, drafts, now_s, next_s = np.random.default_rng(seed), list[Draft](), 0.0, 3.0
    while len(drafts) < requests:
        now_s += rng.exponential(1 / 6.0)
        if now_s >= next_s:
            drafts += [Draft(now_s, ids(rng, 15_000), 100, 1024) for _ in range(3)]
            next_s += 10.0
        prompt = ids(rng, log_normal(rng, 250, 0.8, 2000))
        drafts.append(Draft(now_s, prompt, log_normal(rng, 200, 0.7, 800), 1024))
    return traffic_of(drafts, kv_tokens=200_000)


def many_tiny(seed: int, requests: int) -> Traffic:
    """Questions of a line with answers of a word, ten times as many as asked for, beside chats."""
    rng, drafts, now_s = np.random.default_rng(seed), list[Draft](), 0.0
    while len(drafts) < 10 * requests:
        now_s += rng.exponential(1 / 300.0)
        if len(drafts) % 20 == 0:
            prompt = ids(rng, log_normal(rng, 300, 0.5, 1000))
            drafts.append(Draft(now_s, prompt, log_normal(rng, 250, 0.5, 600), 1024))
        else:
            drafts.append(Draft(now_s, ids(rng, int(rng.integers(5, 30))), 4, 16))
    return traffic_of(drafts, kv_tokens=200_000)


def priority_abuse(seed: int, requests: int) -> Traffic:
    """More than can be served, and three of four requests say that they are the most urgent."""
    rng, drafts, now_s = np.random.default_rng(seed), list[Draft](), 0.0
    while len(drafts) < requests:
        now_s += rng.exponential(1 / 25.0)
        prompt = ids(rng, log_normal(rng, 600, 0.6, 3000))
        urgent = 100 if rng.random() < 0.75 else 0
        drafts.append(Draft(now_s, prompt, log_normal(rng, 250, 0.6, 800), 1024, urgent))
    return traffic_of(drafts, kv_tokens=60_000)
