"""Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC'11): the same key and counter give the same word on every device.
"""

from typing import Final

import torch

Tensor = torch.Tensor

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words per lane. All tensors are int64 [n] with values in [0, 2**32).

    The 64-bit products wrap in int64; their words are right all the same once masked.
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            (high >> 32 & _WORD) ^ b ^ k0,
            high & _WORD,
            (low >> 32 & _WORD) ^ d ^ k1,
            low & _WORD,
        )
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return a, b, c, d


def uniform(seed_lo: Tensor, seed_hi: Tensor, position: Tensor) -> Tensor:
    """[n] float64 in [0, 1): word 0 of key (seed_lo, seed_hi), counter (position, 0, 0, 0).

    seed_lo, seed_hi, position  [n] int32, read as unsigned
    """
    words = [part.to(torch.int64) & _WORD for part in (seed_lo, seed_hi, position)]
    zero = torch.zeros_like(words[2])
    first = philox4x32((words[2], zero, zero, zero), (words[0], words[1]))[0]
    return first.to(torch.float64) / 2.0**32
