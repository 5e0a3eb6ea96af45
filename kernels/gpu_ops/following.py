"""What the kernel after the next one will read: how a small kernel fetches it ahead.

As csrc/fetch_ahead.cuh does it. Knows no kernel.
"""

import functools
import math
from dataclasses import dataclass
from typing import Final

import torch

_PIECE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Following:
    """The weight [out, in] of the next product, and about how much of it to bring into L2."""

    weight: torch.Tensor
    fetched_bytes: int

    def arguments(self) -> tuple[int, int, int]:
        """(address, pieces, bytes between them), as kernels take them."""
        return self.weight.data_ptr(), *pieces_of(self.weight.nbytes, self.fetched_bytes)


@functools.cache
def pieces_of(weight_bytes: int, fetched_bytes: int) -> tuple[int, int]:
    """(how many pieces of 1,024 bytes, bytes between their beginnings).

    An odd number of pieces lies between two, and mostly one that shares no factor with a row's
    number of them: so the pieces fall on all places of k alike.
    """
    whole = weight_bytes // _PIECE_BYTES
    wanted = min(whole, fetched_bytes // _PIECE_BYTES)
    if not wanted:
        return 0, 0
    one_in = -(-whole // wanted)
    while one_in > 1 and math.gcd(one_in, whole) > 1:
        one_in += 1
    return -(-whole // one_in), one_in * _PIECE_BYTES
