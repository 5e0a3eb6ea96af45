"""For how many decode rows, and for how many tokens of a small step, there is a CUDA graph."""

from typing import Final

# A bucket's padding costs little where rows are few; up to 256 graphs are 8 to 32 apart. Above they
# are 64 to 128 apart: each takes memory, and time at the start.
_ROWS: Final = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
MOST_ROWS: Final = _ROWS[-1]
_TOKENS: Final = (16, 32, 64, 96, 128, 192, 256)
MOST_TOKENS: Final = _TOKENS[-1]  # of a small step, prompts' and decode rows' together


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, ascending; the last is `most`, at most MOST_ROWS."""
    most = min(most, MOST_ROWS)
    return (*(bucket for bucket in _ROWS if bucket < most), most)


def token_buckets_up_to(most: int) -> tuple[int, ...]:
    """Numbers of tokens of a small step that get a graph, ascending; none is more than `most`."""
    return tuple(bucket for bucket in _TOKENS if bucket <= most)
