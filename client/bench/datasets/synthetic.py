"""Workloads without a file: random lengths, and prompts that begin alike."""

import random

from client.bench.datasets.prompts import PromptMaker, Range, joined
from client.bench.workload import Session, Turn


def random_lengths(
    maker: PromptMaker, seed: int, sessions: int, input_tokens: Range, output_tokens: Range
) -> list[Session]:
    """Prompts that share nothing."""
    dice = random.Random(seed)
    return [
        Session(
            (Turn(maker.make(dice, dice.randint(*input_tokens)), dice.randint(*output_tokens)),)
        )
        for _ in range(sessions)
    ]


def shared_prefix(
    maker: PromptMaker,
    seed: int,
    sessions: int,
    input_tokens: Range,
    output_tokens: Range,
    *,
    prefix_tokens: int,
    groups: int,
) -> list[Session]:
    """Prompts that begin with one of `groups` prefixes, in random order, as under system prompts.

    input_tokens  of what follows the prefix
    """
    dice = random.Random(seed)
    prefixes = [maker.make(dice, prefix_tokens) for _ in range(groups)]
    return [
        Session(
            (
                Turn(
                    joined(dice.choice(prefixes), maker.make(dice, dice.randint(*input_tokens))),
                    dice.randint(*output_tokens),
                ),
            )
        )
        for _ in range(sessions)
    ]
