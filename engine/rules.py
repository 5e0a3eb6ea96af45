"""A request's penalties, biases and minimal length, as the words that a device takes; its stop ids.

Knows no logits: what each rule does to them is gpu_ops.logit_rules' business.
"""

from collections.abc import Iterable

import numpy as np

from engine.constraints import may_be_masked, single_bad_ids
from engine.request import Int32Array, Request, SamplingParams
from engine.waiting import Waiting
from gpu_ops.rules import RULE_WORDS, Rule

_NO_RULES = np.empty((0, RULE_WORDS), np.int32)


def rule_words(
    row: int,
    params: SamplingParams,
    prompt: Int32Array,
    made: Int32Array,
    stop_ids: Iterable[int],
    *,
    never: Iterable[int] = (),
    has_masks: bool = False,
) -> Int32Array:
    """[n, 4] int32: row, kind, token id, value; empty where the request has no rules.

    prompt     [prompt tokens] int32
    made       [made tokens] int32, the output so far: of a request that was retracted
    stop_ids   what ends the request, and must not before its minimal length
    never      ids that the output does not have
    has_masks  the row draws under masks, which come with its steps
    """
    words = _Words(row)
    if params.allowed_token_ids is not None:
        words.add(Rule.ONLY_ALLOWED)
        words.add_ids(Rule.ALLOWED, params.allowed_token_ids)
    bias = _allowed_bias(params) | dict.fromkeys(never, -np.inf)
    words.add_ids(Rule.BIAS, bias, np.array([*bias.values()], np.float32).view(np.int32))
    if params.min_tokens:
        words.add(Rule.MIN_LENGTH, len(prompt) + params.min_tokens)
        words.add_ids(Rule.EARLY, stop_ids)
    _add_penalties(words, params, prompt, made)
    return words.joined(even_if_none=has_masks)


def rules_of(row: int, waiting: Waiting, stop_ids: Iterable[int]) -> Int32Array:
    """`rule_words` of a request, for the row that it was given."""
    request, made = waiting.request, waiting.token_ids[len(waiting.request.prompt_ids) :]
    return rule_words(
        row, request.params, request.prompt_ids, made, stop_ids,
        never=single_bad_ids(request), has_masks=may_be_masked(request),
    )  # fmt: skip


def stop_ids_of(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """All ids that end the request.

    eos_ids  of the model
    """
    # Where a grammar is complete nothing else may come: so it ends there whatever is asked.
    ignores_eos = request.params.ignore_eos and request.grammar is None
    return (*(() if ignores_eos else eos_ids), *request.params.stop_token_ids)


def _allowed_bias(params: SamplingParams) -> dict[int, float]:
    """Biases by id; what is forbidden stays so."""
    bias = dict(params.logit_bias)
    if params.allowed_token_ids is None:
        return bias
    allowed = frozenset(params.allowed_token_ids)
    return {token_id: value for token_id, value in bias.items() if token_id in allowed}


def _add_penalties(
    words: "_Words", params: SamplingParams, prompt: Int32Array, made: Int32Array
) -> None:
    given = (
        (Rule.REPETITION, params.repetition_penalty, 1.0),
        (Rule.PRESENCE, params.presence_penalty, 0.0),
        (Rule.FREQUENCY, params.frequency_penalty, 0.0),
    )
    chosen = [(kind, value) for kind, value, neutral in given if value != neutral]
    if not chosen:
        return
    for kind, value in chosen:
        words.add(kind, int(np.float32(value).view(np.int32)))
    if params.repetition_penalty != 1.0:
        words.add_ids(Rule.IN_PROMPT, np.unique(prompt).tolist())
    ids, counts = np.unique(made, return_counts=True)
    words.add_ids(Rule.MADE, ids.tolist(), counts.astype(np.int32))


class _Words:
    """Rules of one row, being put together. Owned by the engine thread."""

    def __init__(self, row: int) -> None:
        self._row = row
        self._parts: list[Int32Array] = []

    def add(self, kind: Rule, value: int = 0) -> None:
        self._parts.append(np.array([[self._row, kind, 0, value]], np.int32))

    def add_ids(self, kind: Rule, ids: Iterable[int], values: Int32Array | int = 0) -> None:
        column = np.fromiter(ids, np.int32)
        part = np.empty((len(column), RULE_WORDS), np.int32)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3] = self._row, kind, column, values
        self._parts.append(part)

    def joined(self, *, even_if_none: bool) -> Int32Array:
        """All of them and their BEGIN; where there are none, nothing or BEGIN alone."""
        if not even_if_none and not any(len(part) for part in self._parts):
            return _NO_RULES
        self.add(Rule.BEGIN)
        return np.concatenate(self._parts)
