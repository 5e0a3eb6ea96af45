"""A process's place among those that torchrun started together."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MOST_RANKS: Final = 64
LOOPBACK: Final = "127.0.0.1"  # all that ranks listen on


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place in a torchrun group. Raises ValueError for one that cannot be served."""

    rank: int = 0
    size: int = 1
    job: str = ""  # the same for all ranks of a job, and no other job's on this machine

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> "Rank":
        """What torchrun says; one process on its own where it says nothing."""
        try:
            rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
            here = int(environ.get("LOCAL_WORLD_SIZE", str(size)))
        except ValueError as error:
            raise ValueError(
                f"RANK, WORLD_SIZE and LOCAL_WORLD_SIZE must be whole numbers: {error}"
            ) from error
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(f"WORLD_SIZE is {size}; it must be between 1 and {MOST_RANKS}")
        if not 0 <= rank < size:
            raise ValueError(f"RANK is {rank}; it must be at least 0 and below WORLD_SIZE, {size}")
        if here != size:
            raise ValueError(
                f"WORLD_SIZE is {size} and LOCAL_WORLD_SIZE {here}; all ranks must be on one "
                "machine (torchrun --nnodes 1)"
            )
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        return cls(rank, size, "-".join(environ.get(name, "") for name in names))

    @property
    def is_alone(self) -> bool:
        return self.size == 1
