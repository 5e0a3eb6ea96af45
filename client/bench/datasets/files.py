"""Workloads from files: ShareGPT's conversations, agents' sessions, and traces with times."""

import random
from pathlib import Path
from typing import Any, Final

from client.bench.datasets.prompts import PromptMaker, joined
from client.bench.datasets.records import BadFile, number_of, read_records, text_in
from client.bench.workload import CountTokens, Session, Turn

_BLOCK: Final = 512  # tokens that one id of a trace's `hash_ids` stands for
_ASKING: Final = frozenset({"human", "user"})


def sharegpt(path: Path, seed: int, sessions: int, count: CountTokens) -> list[Session]:
    """First questions of conversations, drawn at random; outputs as long as the answers were.

    A record is {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]};
    those that begin otherwise are left out.
    count  tokens of a text; an estimate will do
    Raises BadFile.
    """
    found = []
    for where, record in read_records(path):
        said = record.get("conversations", record.get("messages"))
        if not isinstance(said, list):
            raise BadFile(f"{where}: no list 'conversations'")
        pair = [_said(each) for each in said[:2]]
        if len(pair) == 2 and pair[0][0] in _ASKING and all(text for _, text in pair):
            found.append(Session((Turn(pair[0][1], max(1, count(pair[1][1]))),)))
    if not found:
        raise BadFile(f"{path}: no conversation begins with a question and an answer")
    dice = random.Random(seed)
    dice.shuffle(found)
    return [found[index % len(found)] for index in range(sessions)]


def _said(message: Any) -> tuple[str, str]:
    """Who spoke, and what; empty where it is not to be had."""
    if not isinstance(message, dict):
        return "", ""
    who, what = (
        message.get("from", message.get("role")),
        message.get("value", message.get("content")),
    )
    return str(who), what if isinstance(what, str) else ""


def agents(path: Path, sessions: int, default_output: int) -> list[Session]:
    """Sessions of several turns, in the file's order, from its start again where it ends.

    A line is {"system": …, "at_s": …, "turns": [{"user": …, "output_tokens": …, "pause_s": …}, …]};
    all but "user" may be left out. Raises BadFile.
    """
    found = []
    for where, record in read_records(path):
        turns = record.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
            raise BadFile(f"{where}: 'turns' is no list of objects with at least one")
        made = tuple(
            Turn(
                text_in(where, turn, "user"),
                max(1, int(number_of(where, turn, "output_tokens", default_output))),
                number_of(where, turn, "pause_s", 0),
            )
            for turn in turns
        )
        at_s = number_of(where, record, "at_s") if "at_s" in record else None
        found.append(Session(made, at_s, text_in(where, record, "system", "")))
    if not found:
        raise BadFile(f"{path}: no session")
    return [found[index % len(found)] for index in range(sessions)]


def trace(path: Path, sessions: int, maker: PromptMaker) -> list[Session]:
    """Requests with the times and lengths of a trace in Mooncake's form; at most `sessions`.

    A line is {"timestamp": milliseconds, "input_length": …, "output_length": …, "hash_ids": […]};
    each of hash_ids, which may be left out, stands for 512 tokens: where two requests have the same
    id, these tokens are the same. Raises BadFile.
    """
    found = []
    for where, record in read_records(path):
        length = max(1, int(number_of(where, record, "input_length")))
        blocks = record.get("hash_ids", [])
        if not isinstance(blocks, list):
            raise BadFile(f"{where}: 'hash_ids' is no list")
        dice = random.Random(f"{where} alone")
        prompt = _prompt_of(maker, dice, length, blocks)
        output = max(1, int(number_of(where, record, "output_length")))
        found.append(Session((Turn(prompt, output),), number_of(where, record, "timestamp") / 1e3))
    if not found:
        raise BadFile(f"{path}: no request")
    return sorted(found, key=lambda session: session.at_s or 0.0)[:sessions]


def _prompt_of(
    maker: PromptMaker, dice: random.Random, length: int, blocks: list[Any]
) -> tuple[int, ...] | str:
    known = blocks[: -(-length // _BLOCK)]
    parts = []
    for index, block in enumerate(known):
        size = min(_BLOCK, length - index * _BLOCK)
        parts.append(maker.make(random.Random(f"block {block}"), size))
    rest = length - len(known) * _BLOCK
    if rest > 0:
        parts.append(maker.make(dice, rest))
    return joined(*parts)
