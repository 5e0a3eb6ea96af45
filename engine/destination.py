"""Where a checkpoint's tensor goes in a model: what loading knows of models."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.sharding import Span


@dataclass(frozen=True, slots=True)
class Destination:
    """A place in the model, and what of the checkpoint's tensor goes there.

    tensor  what is filled
    shape   of the checkpoint's tensor
    part    one slice for each of its dimensions
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: Span | None = None, columns: Span | None = None
           ) -> "Destination":  # fmt: skip
        """Filled by `rows` and `columns` of the checkpoint's tensor; None is all."""
        spans = [Span.all_of(size) for size in tensor.shape]
        if rows is not None:
            spans[0] = rows
        if columns is not None:
            spans[1] = columns
        return cls(
            tensor,
            tuple(span.whole for span in spans),
            tuple(slice(span.start, span.stop) for span in spans),
        )

    @property
    def is_whole(self) -> bool:
        return self.shape == tuple(self.tensor.shape)


Destinations = Iterator[tuple[str, Destination]]
