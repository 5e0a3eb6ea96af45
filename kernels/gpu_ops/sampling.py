"""Choosing a token id from logits: the definition for every device, and what the CPU runs.

Guarantees
- A row's id depends on that row's inputs alone.
- Work is done for what is asked: a greedy batch costs one argmax, nothing is sorted for nothing.

Rows are drawn one by one: a row stays in the processor's cache from its softmax to its running
sum, where the running sums of 16 rows at once are 6 MB that the allocator asks the system for anew.
"""

import torch

from gpu_ops.philox import uniform

Tensor = torch.Tensor


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
    """As `ops.sample`. Synchronises."""
    temperatures = temperature.tolist()
    if 0.0 in temperatures:
        ids = logits.argmax(-1).to(torch.int32)
    else:
        ids = position.new_empty(len(logits))
    if any(temperatures):
        filters = zip(temperatures, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
        draws = uniform(seed_lo, seed_hi, position).tolist()
        for row, (settings, u) in enumerate(zip(filters, draws, strict=True)):
            if settings[0] > 0:
                ids[row] = _draw(logits[row], *settings, u)
    return ids


def _draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> Tensor:
    """The id that `u` in [0, 1) falls on, [], for one row of logits, [v]."""
    kept = kept_probabilities(logits, temperature, top_k, top_p, min_p)
    mass = kept.cumsum(0, dtype=torch.float64)
    index = torch.searchsorted(mass, u * mass[-1:], right=True)[0]
    return index.clamp(max=len(logits) - 1)  # a row of NaN ends past its end


def kept_probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """[v] float32: softmax(logits / temperature) of one row, [v]; 0 where a filter drops the id."""
    probabilities = (logits.float() / temperature).softmax(0)
    if 0 < top_k < len(logits):
        probabilities.masked_fill_(logits < logits.topk(top_k).values[-1], 0.0)
    floor = 0.0
    if min_p > 0:
        floor = float(probabilities.max() * min_p)
    if top_p < 1:
        floor = max(floor, _nucleus_floor(probabilities, top_p))
    if floor > 0:
        probabilities.masked_fill_(probabilities < floor, 0.0)
    return probabilities


def _nucleus_floor(probabilities: Tensor, top_p: float) -> float:
    """The smallest probability in the smallest set that holds `top_p` of the mass there is.

    Few ids need sorting: all those below (1 - top_p) / v of the mass hold less than 1 - top_p of it
    together, so the set is complete before it comes to them. Half of that bound leaves room for
    rounding.
    """
    whole = float(probabilities.sum(dtype=torch.float64))
    is_tail = probabilities < whole * (1 - top_p) / (2 * len(probabilities))
    descending = probabilities[~is_tail].sort(descending=True).values  # NaN is no tail: never empty
    mass = descending.cumsum(0, dtype=torch.float64)
    last = int(torch.searchsorted(mass, top_p * whole))
    return float(descending[min(last, len(descending) - 1)])
