"""How a model is divided among ranks: every weight is somewhere, and nothing twice in a sum."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.destination import Destination
from engine.errors import ModelError
from engine.model_config import ModelConfig, Moe, parse_model_config
from engine.models.decoder import Decoder
from engine.sharding import Span, even_span, share_of

SHAPE = parse_model_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 272, "hidden_size": 48,
        "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
        "max_position_embeddings": 64,
    }
)  # fmt: skip


@given(whole=st.integers(1, 5000), size=st.integers(1, 16))
def test_parts_follow_each_other_and_are_even(whole: int, size: int) -> None:
    parts = [even_span(whole, rank, size) for rank in range(size)]
    assert parts[0].start == 0 and parts[-1].stop == whole
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))
    sizes = [part.size for part in parts]
    aligned = whole % 8 == 0 and whole // 8 >= size
    assert max(sizes) - min(sizes) <= (8 if aligned else 1)
    assert not aligned or all(part.size % 8 == 0 for part in parts)


@given(groups=st.integers(1, 8), group=st.integers(1, 8), size=st.integers(1, 16))
def test_every_query_head_is_on_one_rank_with_its_keys(groups: int, group: int, size: int) -> None:
    config = replace(SHAPE, heads=groups * group, kv_heads=groups)
    if size > groups * group:
        with pytest.raises(ModelError, match="ranks are too many"):
            [share_of(config, rank, size) for rank in range(size)]
        return
    try:
        shares = [share_of(config, rank, size) for rank in range(size)]
    except ModelError:  # ranks are dealt out to heads evenly: one may get more than it has queries
        assert -(-size // groups) > group
        return
    heads = [head for share in shares for head in range(share.heads.start, share.heads.stop)]
    assert heads == list(range(groups * group))
    for share in shares:
        own = share.config
        assert own.heads % own.kv_heads == 0
        for index in range(own.heads):  # by the rule of attention, on the rank and in the whole
            local = share.kv_heads.start + index // (own.heads // own.kv_heads)
            assert local == (share.heads.start + index) // group


@given(vocab=st.integers(1, 3000), size=st.integers(2, 9))
def test_the_vocabulary_is_divided_in_order_into_aligned_rows(vocab: int, size: int) -> None:
    shares = [share_of(replace(SHAPE, vocab_size=vocab, heads=32, kv_heads=32), rank, size)
              for rank in range(size)]  # fmt: skip
    rows = shares[0].vocabulary_rows
    assert rows % 16 == 0 and rows * size >= vocab
    ids = [i for share in shares for i in range(share.vocabulary.start, share.vocabulary.stop)]
    assert ids == list(range(vocab))
    for rank, share in enumerate(shares):
        assert share.vocabulary_rows == rows and share.config.vocab_size == vocab
        assert share.vocabulary.size == 0 or share.vocabulary.start == rank * rows


def test_one_rank_holds_everything_as_it_is() -> None:
    share = share_of(SHAPE)
    assert share.config == SHAPE and share.vocabulary_rows == SHAPE.vocab_size
    assert all(part.is_all for part in (share.heads, share.kv_heads, share.ffn, share.vocabulary))


@pytest.mark.parametrize("moe", [None, Moe(3, 2, 24, True, (True, True))])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranks_parts_make_up_each_weight(size: int, moe: Moe | None) -> None:
    """Biases of divided sums are on one rank; key-value heads, norms and routers may be on many."""
    config = replace(SHAPE, moe=moe)
    models = [outline_of(config, rank, size) for rank in range(size)]
    for name, whole in outline_of(config, 0, 1).items():
        seen = torch.zeros(whole.shape, dtype=torch.int32)
        for model in models:
            if name in model:
                assert model[name].shape == whole.shape
                assert tuple(model[name].tensor.shape) == tuple(seen[model[name].part].shape)
                seen[model[name].part] += 1
        repeated = ("norm", ".k_proj", ".v_proj", "mlp.gate.weight")
        if any(part in name for part in repeated):
            assert seen.min() >= 1, name
        else:
            assert seen.min() == seen.max() == 1, name


def outline_of(config: ModelConfig, rank: int, size: int) -> dict[str, Destination]:
    share = share_of(config, rank, size)
    return Decoder(share, dtype=torch.float32, device="meta", max_positions=8).destinations()


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"heads": 2, "kv_heads": 2}, 3, "3 ranks are too many: the model has 2 attention heads"),
        ({"heads": 64, "kv_heads": 64, "ffn_size": 5}, 6, "intermediate_size is 5"),
        ({"moe": Moe(2, 1, 3, True, (True, True))}, 4, "moe_intermediate_size is 3"),
    ],
)
def test_more_ranks_than_there_is_to_share_are_refused(
    changes: dict[str, object], size: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        for rank in range(size):
            share_of(replace(SHAPE, **changes), rank, size)  # type: ignore[arg-type]


def test_a_span_of_heads_is_one_of_rows() -> None:
    assert Span(1, 3, 4).times(16) == Span(16, 48, 64)
