"""Penalties, biases, minimal lengths and masks, against plain float64 arithmetic."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.rules import rule_words
from gpu_ops.logit_rules import LAST, LogitRules, forbid
from gpu_ops.logprobs import logprobs_of
from gpu_ops.sampling import kept_probabilities

VOCAB = 37
IDS = st.integers(0, VOCAB - 1)
PENALTY = st.floats(-2, 2, width=32)


@st.composite
def some_params(draw: st.DrawFn) -> SamplingParams:
    bias = draw(st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=5))
    allowed = draw(st.none() | st.lists(IDS, min_size=1, max_size=10, unique=True))
    return SamplingParams(
        max_new_tokens=9,
        min_tokens=draw(st.integers(0, 4)),
        presence_penalty=draw(st.just(0.0) | PENALTY),
        frequency_penalty=draw(st.just(0.0) | PENALTY),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.125, 2, width=32)),
        logit_bias=tuple(bias.items()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )


def adjusted_in_float64(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], made: list[int], stops: list[int]
) -> np.ndarray:
    """One row, one id after the other, by the definitions in the fields' documentation."""
    out = logits.astype(np.float64)
    for token_id in range(VOCAB):
        if token_id in prompt or token_id in made:
            penalty = params.repetition_penalty
            out[token_id] = (
                out[token_id] / penalty if out[token_id] > 0 else out[token_id] * penalty
            )
        out[token_id] -= params.frequency_penalty * made.count(token_id)
        out[token_id] -= params.presence_penalty * (token_id in made)
        out[token_id] += dict(params.logit_bias).get(token_id, 0.0)
        if len(made) < params.min_tokens and token_id in stops:
            out[token_id] = min(out[token_id], LAST)
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            out[token_id] = -np.inf
    return out


@settings(deadline=None)
@given(
    everyone=st.lists(
        st.tuples(some_params(), st.lists(IDS, min_size=1, max_size=6), st.lists(IDS, max_size=5)),
        min_size=1,
        max_size=4,
    ),
    stops=st.lists(IDS, max_size=3),
    drawn=st.lists(IDS, min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_rows_are_adjusted_as_by_plain_arithmetic(
    everyone: list[tuple[SamplingParams, list[int], list[int]]],
    stops: list[int],
    drawn: list[int],
    seed: int,
) -> None:
    rules = LogitRules(8, VOCAB, torch.device("cpu"))
    made: dict[int, list[int]] = {}
    for row, (params, prompt, before) in enumerate(everyone):
        rules.apply(rule_words(row, params, np.array(prompt, np.int32),
                               np.array(before, np.int32), stops))  # fmt: skip
        made[row] = list(before)
    rng = np.random.default_rng(seed)
    for token_id in [*drawn, None]:
        rows = np.array(rng.permutation([row for row in made if rules.has(np.array([row]))]), int)
        if not len(rows):
            return
        logits = rng.normal(0, 4, (len(rows), VOCAB)).astype(np.float32)
        lengths = [len(everyone[row][1]) + len(made[row]) for row in rows]
        got = rules.adjust(
            torch.from_numpy(logits), rows.astype(np.int32), torch.tensor(lengths)
        ).numpy()
        for index, row in enumerate(rows.tolist()):
            params, prompt, _ = everyone[row]
            want = adjusted_in_float64(logits[index], params, prompt, made[row], stops)
            assert (np.isneginf(got[index]) == np.isneginf(want)).all()
            np.testing.assert_allclose(got[index], want, rtol=1e-5, atol=2e-5)
        if token_id is not None:
            rules.count(rows.astype(np.int32), torch.full((len(rows),), token_id))
            for row in rows.tolist():
                made[row].append(token_id)


def test_a_row_forgets_the_rules_of_its_last_owner() -> None:
    rules = LogitRules(2, VOCAB, torch.device("cpu"))
    params = SamplingParams(max_new_tokens=1, logit_bias=((3, 5.0),), allowed_token_ids=(3, 4))
    none = np.empty(0, np.int32)
    rows, logits = np.array([1], np.int32), torch.zeros(1, VOCAB)
    rules.apply(rule_words(1, params, none, none, ()))
    assert rules.adjust(logits, rows, torch.tensor([0]))[0, 3] == 5.0
    rules.drop(rows)
    assert not rules.has(rows).any()
    other = dataclasses.replace(params, logit_bias=((7, 1.0),), allowed_token_ids=None)
    rules.apply(rule_words(1, other, none, none, ()))
    want = torch.zeros(1, VOCAB)
    want[0, 7] = 1.0
    assert torch.equal(rules.adjust(logits, rows, torch.tensor([0])), want)


@pytest.mark.parametrize("temperature", [1e-5, 0.7, 2.0])
def test_an_early_end_is_drawn_where_nothing_else_is_allowed(temperature: float) -> None:
    rules, row = LogitRules(1, VOCAB, torch.device("cpu")), np.array([0], np.int32)
    params = SamplingParams(max_new_tokens=9, min_tokens=5)
    rules.apply(rule_words(0, params, np.arange(3, dtype=np.int32), np.empty(0, np.int32), (4,)))
    adjusted = rules.adjust(torch.randn(1, VOCAB), row, torch.tensor([3]))
    assert kept_probabilities(adjusted[0], temperature, 0, 1.0, 0.0)[4] == 0
    complete = forbid(adjusted, row, row, np.array([[1 << 4, 0]], np.int32))  # by a grammar
    assert kept_probabilities(complete[0], temperature, 3, 0.9, 0.1)[4] == 1


def test_a_request_without_rules_has_no_words() -> None:
    params = SamplingParams(max_new_tokens=5)
    assert not rule_words(0, params, np.arange(3, dtype=np.int32), np.empty(0, np.int32), [2]).size


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_masks_forbid_what_they_leave_out(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    allowed = rng.integers(0, 2, (2, vocab)).astype(np.bool_)
    padded = np.zeros((2, -(-vocab // 32) * 32), np.bool_)
    padded[:, :vocab] = allowed
    masks = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(3, vocab)
    rows = np.array([5, 9, 2], np.int32)
    got = forbid(logits.clone(), rows, np.array([2, 5], np.int32), masks)
    assert torch.equal(got[1], logits[1])
    for index, mask in ((2, allowed[0]), (0, allowed[1])):
        assert torch.equal(got[index][mask], logits[index][mask])
        assert torch.isneginf(got[index][~mask]).all()


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB, VOCAB + 3])
def test_logprobs_are_those_of_float64(k: int) -> None:
    logits = torch.randn(4, VOCAB, dtype=torch.float32) * 5
    ids = torch.tensor([0, 5, VOCAB - 1, 7], dtype=torch.int32)
    got = logprobs_of(logits, ids, k)
    want = logits.double().log_softmax(-1)
    for row, token_id in enumerate(ids.tolist()):
        assert got.chosen[row].item() == pytest.approx(want[row, token_id].item(), abs=1e-5)
        assert got.ranks[row] == 1 + (want[row] > want[row, token_id]).sum()
        best = want[row].sort(descending=True)
        assert got.top_ids[row].tolist() == best.indices[:k].tolist()
        np.testing.assert_allclose(got.top[row], best.values[:k], atol=1e-5)
