"""What a small step reads of each of its tokens, be it a prompt's or a decode row's."""

from dataclasses import dataclass

import torch

from gpu_ops.cuda_decode import DecodeInputs, decode_inputs

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Each [n] int32; written anew every step.

    rows          whose pages hold the token's keys
    sampled_rows  whose next token comes of it; the dummy row where it is not the last
    """

    inputs: DecodeInputs
    rows: Tensor
    sampled_rows: Tensor

    @classmethod
    def allocate(cls, tokens: int, device: torch.device) -> "TokenInputs":
        rows, sampled_rows = torch.empty((2, tokens), dtype=torch.int32, device=device).unbind(0)
        return cls(decode_inputs(tokens, device), rows, sampled_rows)

    def first(self, n: int) -> "TokenInputs":
        """Those of the first n tokens."""
        return TokenInputs(self.inputs.first(n), self.rows[:n], self.sampled_rows[:n])
