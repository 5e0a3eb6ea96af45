"""The keys and values of all pages, for every layer. Knows nothing of who owns a page."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.footprint import kv_token_bytes
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvCache:
    """One key and one value tensor per layer. Owned by the engine thread.

    keys, values  each [pages, page_size, kv_heads, head_dim], contiguous
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KvCache":
        """Zeroed: a masked key still has weight 0 × value, which must not be 0 × NaN.

        On the CPU the memory is taken from the system only as pages are first written.
        """
        shape = (2, config.layers, pages, page_size, config.kv_heads, config.head_dim)
        if torch.device(device).type == "cpu":
            # numpy's zeros are the system's own and cost nothing; torch's are written one by one.
            zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            both = torch.from_numpy(zeros).view(dtype).view(shape)
        else:
            both = torch.zeros(shape, dtype=dtype, device=device)
        return cls(both[0].unbind(0), both[1].unbind(0))


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers."""
    return page_size * kv_token_bytes(config, dtype.itemsize)
