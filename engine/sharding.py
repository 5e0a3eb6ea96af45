"""Which part of a model each rank of a tensor-parallel group holds. Knows no tensors.

Query and key-value heads, the MLP's inner dimension and the vocabulary are divided; what is left
(norms, routers, the residual stream) every rank has whole. Parts need not be equal: a model of 3
key-value heads is served by 2 ranks, too.
"""

import dataclasses
from dataclasses import dataclass
from typing import Final

from engine.errors import ModelError
from engine.model_config import ModelConfig, Moe

# Elements; 16 bytes of 2-byte ones, which is what kernels read at a time.
_ALIGNED: Final = 8
_VOCABULARY_ROWS: Final = 16  # every rank's vocabulary is a multiple, so that products stay aligned


@dataclass(frozen=True, slots=True)
class Span:
    """The part [start, stop) of `whole` rows or columns of a weight."""

    start: int
    stop: int
    whole: int

    @classmethod
    def all_of(cls, whole: int) -> "Span":
        return cls(0, whole, whole)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_all(self) -> bool:
        return self.size == self.whole

    def times(self, width: int) -> "Span":
        """The same of things that are `width` rows each."""
        return Span(self.start * width, self.stop * width, self.whole * width)


def even_span(whole: int, rank: int, size: int) -> Span:
    """Rank's part of `whole`, as even as aligned parts can be; no two parts overlap."""
    unit = _ALIGNED if whole % _ALIGNED == 0 and whole // _ALIGNED >= size else 1
    units = whole // unit
    return Span(units * rank // size * unit, units * (rank + 1) // size * unit, whole)


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model.

    config           the part's shapes; vocab_size is the whole's, as logits are of all ids
    heads            query heads; all read key-value heads of this rank
    kv_heads         held by several ranks where there are fewer than ranks
    vocabulary       ids whose rows of the embedding and of the output layer are here
    vocabulary_rows  the same on every rank; rows beyond `vocabulary` are zero
    """

    rank: int
    size: int
    config: ModelConfig
    heads: Span
    kv_heads: Span
    ffn: Span
    expert_ffn: Span
    vocabulary: Span
    vocabulary_rows: int

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what must be added once, such as the bias of a divided sum."""
        return self.rank == 0


def share_of(config: ModelConfig, rank: int = 0, size: int = 1) -> Share:
    """The part that `rank` of `size` holds. Raises ModelError for more ranks than can share it."""
    heads, kv_heads = _heads(config, rank, size)
    ffn = _inner("intermediate_size", config.ffn_size, rank, size)
    expert_ffn, moe = Span.all_of(0), config.moe
    if moe is not None:
        expert_ffn = _inner("moe_intermediate_size", moe.ffn_size, rank, size)
        moe = Moe(moe.experts, moe.top_k, expert_ffn.size, moe.renormalise, moe.layers)
    rows = config.vocab_size
    if size > 1:
        rows = -(-rows // (size * _VOCABULARY_ROWS)) * _VOCABULARY_ROWS
    first, end = (min(at * rows, config.vocab_size) for at in (rank, rank + 1))
    own = dataclasses.replace(
        config, heads=heads.size, kv_heads=kv_heads.size, ffn_size=ffn.size, moe=moe
    )
    vocabulary = Span(first, end, config.vocab_size)
    return Share(rank, size, own, heads, kv_heads, ffn, expert_ffn, vocabulary, rows)


def _heads(config: ModelConfig, rank: int, size: int) -> tuple[Span, Span]:
    """Query and key-value heads: whole groups, or a part of one group's queries."""
    groups, group = config.kv_heads, config.heads // config.kv_heads
    if size <= groups:
        kv_heads = Span(groups * rank // size, groups * (rank + 1) // size, groups)
        return kv_heads.times(group), kv_heads
    # Ranks are dealt out to key-value heads; those of one head share its queries.
    head = rank * groups // size
    sharing = [other for other in range(size) if other * groups // size == head]
    if len(sharing) > group:
        raise ModelError(
            f"{size} ranks are too many: the model has {config.heads} attention heads, of which "
            f"{group} share each of {groups} key-value heads"
        )
    index = sharing.index(rank)
    start, stop = (head * group + group * at // len(sharing) for at in (index, index + 1))
    return Span(start, stop, config.heads), Span(head, head + 1, groups)


def _inner(name: str, whole: int, rank: int, size: int) -> Span:
    if whole < size:
        raise ModelError(f"{size} ranks are too many: {name} is {whole}")
    return even_span(whole, rank, size)
