"""For how many decode rows, and for how many tokens of a small step, there is a CUDA graph."""

from typing import Final

# A bucket's padding costs little where rows are few or many; between, graphs are 8 to 32 apart.
_ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)
_TOKENS: Final = (16, 32, 64, 96, 128, 192, 256)
MOST_TOKENS: Final = _TOKENS[-1]  # of a small step, prompts' and decode rows' together


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, ascending; the last is `most`, or 256 if that is less."""
    most = min(most, _ROWS[-1])
    return (*(bucket for bucket in _ROWS if bucket < most), most)


def token_buckets_up_to(most: int) -> tuple[int, ...]:
    """Numbers of tokens of a small step that get a graph, ascending; none is more than `most`."""
    return tuple(bucket for bucket in _TOKENS if bucket <= most)
