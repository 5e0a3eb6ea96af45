"""The sampler: the generator's published answers, distributions, filters and their edges."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gpu_ops import ops
from gpu_ops.philox import philox4x32, uniform
from gpu_ops.sampling import kept_probabilities

Tensor = torch.Tensor
VOCAB = 40
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "seed_lo", "seed_hi", "position")


def sample(logits: Tensor, **given: Any) -> Tensor:
    """`ops.sample`; a number stands for a column of it, what is not given is off."""
    whole = dict.fromkeys(PARAMETERS, 0) | {"temperature": 1.0, "top_p": 1.0} | given
    columns = []
    for name in PARAMETERS:
        dtype = torch.float32 if name in ("temperature", "top_p", "min_p") else torch.int32
        value = torch.as_tensor(whole[name]).to(dtype)
        columns.append(value.expand(len(logits)).contiguous())
    return ops.sample(logits, *columns)


def draws(logits: Tensor, count: int, **settings: Any) -> Tensor:
    """`count` draws from one row's logits, at positions 0, 1, …"""
    positions = torch.arange(count, dtype=torch.int32)
    return sample(logits.expand(count, -1).contiguous(), position=positions, seed_lo=11, **settings)


def counts(logits: Tensor, count: int = 4000, **settings: Any) -> Tensor:
    return torch.bincount(draws(logits, count, **settings).long(), minlength=len(logits))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    """Known answers of Random123's own test suite."""
    lanes = [torch.tensor([word, 0]) for word in (*counter, *key)]
    result = philox4x32((lanes[0], lanes[1], lanes[2], lanes[3]), (lanes[4], lanes[5]))
    assert tuple(int(word[0]) for word in result) == words


def test_uniform_reads_its_inputs_as_unsigned() -> None:
    minus_one = torch.tensor([-1], dtype=torch.int32)
    zero = torch.tensor([0], dtype=torch.int32)
    assert float(uniform(zero, zero, zero)[0]) == 0x6627E8D5 / 2**32
    lane = torch.tensor([0xFFFFFFFF])
    word = philox4x32((lane, lane * 0, lane * 0, lane * 0), (lane, lane))[0]
    assert float(uniform(minus_one, minus_one, minus_one)[0]) == int(word[0]) / 2**32


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [7, 30]] = 2.0
    assert sample(logits, temperature=0.0).tolist() == [0, 7]
    mixed = sample(logits, temperature=torch.tensor([1.0, 0.0]))
    assert mixed.dtype == torch.int32 and mixed[1] == 7


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 40 ids; 39 degrees of freedom exceed 72.1 with probability 0.001."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    expected = (logits / temperature).softmax(0) * 4000
    observed = counts(logits, temperature=temperature)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    print(f"chi-square {chi_square:.1f}, allowed 72.1")
    assert chi_square < 72.1


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.1, "temperature": 1.5},
    ],
    ids=str,
)
def test_filters_keep_the_shape_of_what_stays(filters: dict[str, float]) -> None:
    """The kept set is computed here one id at a time, and the draws follow p within it."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    p = (logits / filters.get("temperature", 1.0)).softmax(0).double()
    order = p.argsort(descending=True).tolist()
    ranked = order[: int(filters.get("top_k", VOCAB))]
    needed = filters.get("top_p", 1.0) * float(p[ranked].sum())
    mass, kept = 0.0, set()
    for i in ranked:
        if mass >= needed:
            break
        kept.add(i)
        mass += float(p[i])
    kept &= {i for i in order if p[i] >= filters.get("min_p", 0.0) * p.max()}
    assert 1 < len(kept) < VOCAB
    observed = counts(logits, **filters)
    assert set(observed.nonzero()[:, 0].tolist()) == kept
    inside = sorted(kept)
    expected = p[inside] / p[inside].sum() * 4000
    chi_square = float(((observed[inside] - expected) ** 2 / expected).sum())
    limit = len(kept) + 5 * (2 * len(kept)) ** 0.5  # 5 deviations above the mean
    print(f"chi-square {chi_square:.1f}, allowed {limit:.1f}")
    assert chi_square < limit


def by_transformers(logits: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that transformers' own filters leave, in its order, in float64."""
    scores = logits[None].double()
    warpers = [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    if top_k:
        warpers.insert(0, TopKLogitsWarper(top_k))
    for warper in warpers:
        scores = warper(torch.empty(1, 0), scores)
    return set(scores[0].isfinite().nonzero()[:, 0].tolist())


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(-20, 20, width=16), min_size=1, max_size=60),
    temperature=st.floats(0.25, 4),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_the_kept_ids_are_those_of_transformers(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Between what slightly narrower and slightly wider filters keep there.

    Logits of up to 80 in float32 are off by 2^-18, so masses and their sums by that share of them.
    Of equal logits at an edge transformers keeps some, and we all.
    """
    logits = torch.tensor(values)
    kept = kept_probabilities(logits, temperature, top_k, top_p, min_p)
    found = set(kept.nonzero()[:, 0].tolist())
    slack = 2.0**-12
    scaled = logits.double() / temperature
    narrow = by_transformers(scaled, top_k, max(0.0, top_p - slack), min(1.0, min_p + slack))
    wide = by_transformers(scaled, top_k, min(1.0, top_p + slack), max(0.0, min_p - slack))
    least = min(values[i] for i in wide)
    assert narrow <= found <= {i for i, value in enumerate(values) if value >= least}


def test_top_p_is_of_what_top_k_leaves() -> None:
    """p = 0.4, 0.3, 0.2, 0.1: of the two largest the first alone has 0.57 of the mass."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept_probabilities(logits, 1.0, 2, 0.5, 0.0).count_nonzero() == 1
    assert kept_probabilities(logits, 1.0, 0, 0.5, 0.0).count_nonzero() == 2
    assert kept_probabilities(logits, 1.0, 3, 0.7, 0.0).count_nonzero() == 2
    assert kept_probabilities(logits, 1.0, 0, 0.75, 0.0).count_nonzero() == 3


def test_equals_at_a_threshold_all_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert set(draws(logits, 400, top_k=2).tolist()) == {1, 2, 3, 4}
    p = logits.softmax(0)
    just_over_one = float(p[1]) + 0.01
    assert set(draws(logits, 400, top_p=just_over_one).tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str
)
def test_the_narrowest_filters_are_greedy(settings: dict[str, float]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    assert set(draws(logits, 50, **settings).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("settings", [{"top_k": VOCAB}, {"top_k": VOCAB + 9}, {"top_p": 1.0}])
def test_the_widest_filters_are_off(settings: dict[str, float]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    assert torch.equal(draws(logits, 200, **settings), draws(logits, 200))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999999])
def test_wide_vocabularies_find_the_same_nucleus(top_p: float) -> None:
    """Over 1024 ids the nucleus is first looked for among the largest."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(5))
    descending, order = logits.softmax(0).sort(descending=True)
    size = int((descending.double().cumsum(0) < top_p).sum()) + 1
    rank = torch.empty_like(order)
    rank[order] = torch.arange(5000)
    drawn = rank[draws(logits, 400, top_p=top_p).long()]
    assert 0.8 * size < int(drawn.max()) < size


def test_a_row_does_not_depend_on_its_mates() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(12, 3000, generator=generator)
    settings = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3] * 3),
        "top_k": torch.tensor([0, 0, 40, 7] * 3),
        "top_p": torch.tensor([1.0, 0.8, 0.95] * 4),
        "min_p": torch.tensor([0.0, 0.05] * 6),
        "seed_lo": torch.arange(12) - 6,
        "seed_hi": torch.arange(12) * 77,
        "position": torch.arange(12) + 100,
    }
    together = sample(logits, **settings)
    for row in range(12):
        alone = {name: values[row : row + 1] for name, values in settings.items()}
        assert sample(logits[row : row + 1], **alone)[0] == together[row]
    backwards = {name: values.flip(0) for name, values in settings.items()}
    assert torch.equal(sample(logits.flip(0), **backwards), together.flip(0))


def test_seed_and_position_both_count() -> None:
    logits = torch.zeros(64, VOCAB)
    here = torch.arange(64)
    assert len(set(sample(logits, position=here).tolist())) > 10
    assert len(set(sample(logits, seed_lo=here).tolist())) > 10
    assert len(set(sample(logits, seed_hi=here).tolist())) > 10
    assert len(set(sample(logits).tolist())) == 1


def test_impossible_ids_are_never_drawn() -> None:
    logits = torch.full((500, VOCAB), float("-inf"))
    logits[:, 3], logits[:, 20] = 0.0, 0.0
    positions = torch.arange(500, dtype=torch.int32)
    assert set(sample(logits, position=positions).tolist()) == {3, 20}


def test_broken_logits_still_give_an_id_of_the_vocabulary() -> None:
    """CVE-2026-54234: an id beyond it, fed back, would read beyond the embedding."""
    logits = torch.full((1, VOCAB), float("nan"))
    assert 0 <= int(sample(logits)[0]) < VOCAB
    assert 0 <= int(sample(logits, temperature=0.0)[0]) < VOCAB


def test_bfloat16_logits() -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(7)).bfloat16()
    assert torch.equal(sample(logits, position=3), sample(logits.float(), position=3))
