"""Choosing a token id from logits: the definition for every device, and what the CPU runs.

Guarantees
- A row's id depends on that row's inputs alone.
- Work is done for what a batch asks: a greedy batch costs one argmax, no row is sorted for nothing.
"""

from typing import Final

import torch

from gpu_ops.philox import uniform

Tensor = torch.Tensor

# Most nuclei are small: they are looked for among so many largest logits before a whole row is
# sorted, which takes 13 ms for 49,152 logits where this takes 1.3 ms (2-core AVX2 machine).
_NUCLEUS_CANDIDATES: Final = 1024


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed_lo: Tensor,
    seed_hi: Tensor,
    position: Tensor,
) -> Tensor:
    """As `ops.sample`. Synchronises: it looks at the parameters to skip work."""
    greedy = temperature == 0
    if bool(greedy.all()):
        return logits.argmax(-1).to(torch.int32)
    rows = (~greedy).nonzero()[:, 0]
    chosen = logits if len(rows) == len(logits) else logits[rows]
    kept = _kept_probabilities(chosen, temperature[rows], top_k[rows], top_p[rows], min_p[rows])
    drawn = _first_above(kept, uniform(seed_lo[rows], seed_hi[rows], position[rows]))
    if chosen is logits:
        return drawn
    ids = logits.argmax(-1).to(torch.int32)
    ids[rows] = drawn
    return ids


def _kept_probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """[n, v] float32: softmax(logits / temperature), 0 where a filter drops the id."""
    probabilities = (logits.float() / temperature[:, None]).softmax(-1)
    floor = min_p * probabilities.amax(-1)
    by_mass = (top_p < 1).nonzero()[:, 0]
    if len(by_mass):
        limits = _nucleus_floor(probabilities[by_mass], top_p[by_mass])
        floor[by_mass] = torch.maximum(floor[by_mass], limits)
    dropped = probabilities < floor[:, None]
    by_rank = ((top_k > 0) & (top_k < logits.shape[-1])).nonzero()[:, 0]
    if len(by_rank):
        limits = _kth_largest(logits[by_rank], top_k[by_rank])
        dropped[by_rank] |= logits[by_rank] < limits[:, None]
    return probabilities.masked_fill_(dropped, 0.0)


def _kth_largest(values: Tensor, k: Tensor) -> Tensor:
    """[n]: the k-th largest of each row."""
    largest = values.topk(int(k.max()), dim=-1).values
    return largest.gather(1, (k - 1).long()[:, None])[:, 0]


def _nucleus_floor(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """[n]: the smallest probability in the smallest set that holds a mass of `top_p`."""
    width = probabilities.shape[-1]
    if width > _NUCLEUS_CANDIDATES:
        largest = probabilities.topk(_NUCLEUS_CANDIDATES, dim=-1).values
        if bool((largest.sum(-1, dtype=torch.float64) >= top_p).all()):
            return _at_mass(largest, top_p)
    return _at_mass(probabilities.sort(-1, descending=True).values, top_p)


def _at_mass(descending: Tensor, top_p: Tensor) -> Tensor:
    mass = descending.cumsum(-1, dtype=torch.float64)
    index = (mass < top_p[:, None]).sum(-1).clamp(max=descending.shape[-1] - 1)
    return descending.gather(1, index[:, None])[:, 0]


def _first_above(kept: Tensor, u: Tensor) -> Tensor:
    """[n] int32: the first id at which the running mass exceeds u × the whole mass."""
    mass = kept.cumsum(-1, dtype=torch.float64)
    target = (u * mass[:, -1])[:, None]
    ids = torch.searchsorted(mass, target, right=True)[:, 0]
    return ids.clamp(max=kept.shape[-1] - 1).to(torch.int32)  # a row of NaN ends past its end
