"""The model of scaling: one rank is one GPU, and more ranks divide all that they can."""

import pytest

from perf.scaling import ITEM, LINK_BYTES_S, MEMORY_BYTES_S, MODELS, step_floor

BILLION = {"Qwen3-8B": 7.57, "Qwen3-14B": 13.99, "Qwen3-32B": 31.98, "Qwen3-30B-A3B": 3.04}


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_reads_its_weights_and_waits_for_nobody(name: str) -> None:
    floor = step_floor(MODELS[name], 1, 1, 0)
    assert floor.collectives_s == 0
    # As published, without the embedding, of which a token reads one row.
    assert floor.compute_s * MEMORY_BYTES_S / ITEM == pytest.approx(BILLION[name] * 1e9, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_ranks_divide_the_work_and_wait_for_each_other(name: str, ranks: int) -> None:
    config, batch, context = MODELS[name], 64, 2000
    alone, shared = (step_floor(config, size, batch, context) for size in (1, ranks))
    slowest = 1.0 if config.kv_heads >= ranks else 2.0  # two ranks then keep the same head
    assert 1 / ranks <= shared.compute_s / alone.compute_s <= 1.02 * slowest / ranks
    sums, row = 2 * config.layers + 1, config.hidden_size * ITEM
    share = (ranks - 1) / ranks
    assert shared.sums_s == pytest.approx(2 * share * sums * batch * row / LINK_BYTES_S)
    assert shared.gather_s == pytest.approx(share * batch * 151936 * ITEM / LINK_BYTES_S)
    assert shared.step_s < alone.step_s
