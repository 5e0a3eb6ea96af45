"""A process's place among those that torchrun started together, on one machine or several."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MOST_RANKS: Final = 64
LOOPBACK: Final = "127.0.0.1"  # all that ranks of one machine listen on

Address = tuple[str, int]  # host, port


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place in a torchrun group. Raises ValueError for one that cannot be served."""

    rank: int = 0
    size: int = 1
    job: str = ""  # the same for all ranks of a machine, and no other job's there
    local_rank: int = 0  # among the ranks of this machine, whose numbers are consecutive
    local_size: int = 1
    store: Address | None = None  # torchrun's; None on one machine, where nobody asks it

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> "Rank":
        """What torchrun says; one process on its own where it says nothing."""
        try:
            rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
            local_rank = int(environ.get("LOCAL_RANK", str(rank)))
            local_size = int(environ.get("LOCAL_WORLD_SIZE", str(size)))
        except ValueError as error:
            raise ValueError(
                f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers: {error}"
            ) from error
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(f"WORLD_SIZE is {size}; it must be between 1 and {MOST_RANKS}")
        if not 0 <= rank < size:
            raise ValueError(f"RANK is {rank}; it must be at least 0 and below WORLD_SIZE, {size}")
        if not 1 <= local_size <= size:
            raise ValueError(
                f"LOCAL_WORLD_SIZE is {local_size}; it must be between 1 and WORLD_SIZE, {size}"
            )
        if not 0 <= local_rank < local_size or not 0 <= rank - local_rank <= size - local_size:
            raise ValueError(
                f"LOCAL_RANK is {local_rank}, which does not fit RANK {rank}, WORLD_SIZE {size} "
                f"and LOCAL_WORLD_SIZE {local_size}"
            )
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        job = "-".join(environ.get(name, "") for name in names)
        store = None if local_size == size else _torchruns_store(environ)
        return cls(rank, size, job, local_rank, local_size, store)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_near(self) -> bool:
        """Whether rank 0 is on this machine."""
        return self.rank == self.local_rank

    @property
    def near(self) -> range:
        """The ranks of this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)


def _torchruns_store(environ: Mapping[str, str]) -> Address:
    """Where torchrun on rank 0's machine keeps what its ranks tell each other."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not host or not port.isdecimal():
        raise ValueError(
            "ranks on several machines need torchrun's own store: start them by torchrun --nnodes, "
            "with --rdzv-backend static or c10d and without TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        )
    return host, int(port)
