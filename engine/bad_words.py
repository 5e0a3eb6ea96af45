"""Token sequences that an output must not have in it, and what its next token may therefore not be.

A sequence is kept out at its last token: where the output ends with all before it. Sequences of one
token are no matter of the output, but rules that always hold (engine.rules).

Time for a token is linear in the sequences that are under way, whatever they consist of (Knuth,
Morris and Pratt). Knows no text: engine.tokenizer makes sequences of words.
"""

from collections.abc import Iterable


class BadWords:
    """Where one output stands in the sequences that it must not have. Owned by the engine thread.

    Only tokens of the output count: a sequence that begins in the prompt is none.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        """sequences  of two tokens and more; others are left out"""
        self._by_first: dict[int, list[_Sequence]] = {}
        for sequence in (_Sequence(each) for each in sequences if len(each) > 1):
            self._by_first.setdefault(sequence.first, []).append(sequence)
        self._under_way: list[_Sequence] = []  # the output ends with one token of it at least

    def take(self, token_id: int) -> None:
        """The output's next token."""
        for sequence in self._by_first.get(token_id, ()):
            if not sequence.matched:
                self._under_way.append(sequence)
        for sequence in self._under_way:
            sequence.take(token_id)
        self._under_way = [each for each in self._under_way if each.matched]

    def next_ids(self) -> list[int]:
        """Ids that may not come next."""
        return [each.last for each in self._under_way if each.is_complete_but_last]


class _Sequence:
    """One sequence, and how much of it the output ends with. Owned by the engine thread."""

    __slots__ = ("_before", "_borders", "last", "matched")

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._before, self.last = ids[:-1], ids[-1]
        self.matched = 0  # the output ends with _before[:matched]
        # _borders[i]: length of the longest proper prefix of _before[: i + 1] that also ends it.
        self._borders = [0]
        for token_id in self._before[1:]:
            self._borders.append(self._next(self._borders[-1], token_id))

    @property
    def first(self) -> int:
        return self._before[0]

    @property
    def is_complete_but_last(self) -> bool:
        return self.matched == len(self._before)

    def take(self, token_id: int) -> None:
        matched = self._borders[-1] if self.is_complete_but_last else self.matched
        self.matched = self._next(matched, token_id)

    def _next(self, matched: int, token_id: int) -> int:
        while matched and self._before[matched] != token_id:
            matched = self._borders[matched - 1]
        return matched + 1 if self._before[matched] == token_id else 0
