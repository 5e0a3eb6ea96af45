"""The protocol of csrc/reduce_norm.cu as a model, in every order in which ranks can take steps.

A model: it shows that flags which count up and two halves of slots suffice, whatever the ranks'
speeds; not that the kernel's code is the model's. Its memory is sequentially consistent, which is
what release and acquire give to whoever reads slots after a flag. A row's partial sum is two words,
written and read one at a time, so that what is half new is noticed.
"""

from collections.abc import Iterator

import pytest

# A rank: the kernel it is in, and for each of its rows the next step and the round.
# Memory of all: (what, rank that has it, ...) -> value.
Rank = tuple[int, tuple[int, ...], tuple[int, ...]]
State = tuple[tuple[Rank, ...], frozenset[tuple[tuple[int | str, ...], int]]]


class Protocol:
    """Ranks that run kernels of so many rows each. Owned by one test."""

    def __init__(self, ranks: int, kernels: tuple[int, ...], *, halves: int = 2) -> None:
        self.ranks, self.kernels, self.halves = ranks, kernels, halves
        self.peers = [[p for p in range(ranks) if p != rank] for rank in range(ranks)]
        # Of one row: write both words to each peer, raise each flag, see each flag, read.
        per_peer = ("write 0", "write 1")
        self.steps = [
            [(what, peer) for peer in peers for what in per_peer]
            + [("raise", peer) for peer in peers]
            + [("await", peer) for peer in peers]
            + [(what, peer) for peer in peers for what in ("read 0", "read 1")]
            for peers in self.peers
        ]

    def start(self) -> State:
        rows = max(self.kernels)
        one: Rank = (0, (0,) * self.kernels[0], (1,) * rows)
        return (one,) * self.ranks, frozenset()

    def next_states(self, state: State) -> Iterator[State]:
        """Raises ValueError where a rank reads what is not its round's."""
        ranks, memory = state
        for rank, (kernel, at, rounds) in enumerate(ranks):
            if kernel == len(self.kernels):
                continue
            for row, step in enumerate(at):
                if step == len(self.steps[rank]):
                    continue
                after = self._take(dict(memory), rank, row, step, rounds[row])
                if after is not None:
                    mine = self._advance(rank, kernel, at, rounds, row)
                    yield ranks[:rank] + (mine,) + ranks[rank + 1 :], frozenset(after.items())

    def _take(
        self, memory: dict[tuple[int | str, ...], int], rank: int, row: int, step: int, now: int
    ) -> dict[tuple[int | str, ...], int] | None:
        """Memory after the step; None where it has to wait."""
        what, peer = self.steps[rank][step]
        half = now % self.halves
        if what.startswith("write"):
            memory[what[-1], peer, half, row, rank] = now
        elif what == "raise":
            memory["flag", peer, row, rank] = now
        elif what == "await":
            if memory.get(("flag", rank, row, peer), 0) < now:
                return None
        elif memory[what[-1], rank, half, row, peer] != now:
            raise ValueError(f"rank {rank} read another round's partial sum")
        return memory

    def _advance(
        self, rank: int, kernel: int, at: tuple[int, ...], rounds: tuple[int, ...], row: int
    ) -> Rank:
        at = at[:row] + (at[row] + 1,) + at[row + 1 :]
        if any(step < len(self.steps[rank]) for step in at):
            return kernel, at, rounds
        # The kernel ends, and the next begins: a row's round is its own.
        rounds = tuple(n + (index < len(at)) for index, n in enumerate(rounds))
        kernel += 1
        rows = self.kernels[kernel] if kernel < len(self.kernels) else 0
        return kernel, (0,) * rows, rounds


def explore(protocol: Protocol) -> int:
    """How many states there are. Raises ValueError for a wrong read, or where nobody can go on."""
    seen = {protocol.start()}
    waiting = list(seen)
    while waiting:
        state = waiting.pop()
        following = list(protocol.next_states(state))
        if not following and any(kernel < len(protocol.kernels) for kernel, _, _ in state[0]):
            raise ValueError("every rank waits for another")
        for one in following:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return len(seen)


@pytest.mark.parametrize(
    ("ranks", "kernels"),
    [(2, (1, 1, 1, 1, 1)), (2, (2, 1, 2, 1)), (2, (1, 2, 1, 1)), (3, (1, 1, 1))],
)
def test_every_order_of_steps_gives_the_sums(ranks: int, kernels: tuple[int, ...]) -> None:
    assert explore(Protocol(ranks, kernels)) > 100


def test_one_half_would_not_do() -> None:
    with pytest.raises(ValueError, match="another round's"):
        explore(Protocol(2, (1, 1), halves=1))


def test_a_rank_that_launches_less_leaves_the_others_waiting() -> None:
    lazy = Protocol(2, (1, 1))
    lazy.steps[1] = lazy.steps[1][:2]  # it never raises its flag
    with pytest.raises(ValueError, match="waits for another"):
        explore(lazy)
