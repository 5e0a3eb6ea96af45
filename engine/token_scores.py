"""Log-probabilities of ids, as a client sees them: with each token's own text and bytes.

They are of the tokens of the content that is told, and are told no sooner than its text.
"""

from collections import deque

from engine.request import Int32Array, Logprobs, TokenScore, TokenText
from engine.text_decoder import TextDecoders


class TokenScores:
    """Texts of single tokens, each made once. Owned by the detokenizer thread."""

    def __init__(self, decoders: TextDecoders) -> None:
        self._decoders = decoders
        self._texts: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int, logprob: float) -> TokenText:
        known = self._texts.get(token_id)
        if known is None:
            utf8 = self._decoders.utf8_of(token_id)
            known = self._texts[token_id] = utf8.decode("utf-8", "replace"), utf8
        return TokenText(token_id, *known, logprob)

    def scores(self, token_ids: Int32Array | tuple[int, ...], told: Logprobs) -> list[TokenScore]:
        """One for each id; `told` is of the same ids."""
        columns = (told.chosen, told.ranks, told.top_ids, told.top)
        return [
            TokenScore(
                self.text(int(token_id), chosen),
                rank,
                tuple(self.text(one, value) for one, value in zip(top_ids, top, strict=True)),
            )
            for token_id, chosen, rank, top_ids, top in zip(
                token_ids, *(column.tolist() for column in columns), strict=True
            )
        ]


class HeldScores:
    """One response's scores, until it is known whether their text is told.

    Owned by the detokenizer thread.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: deque[tuple[int, TokenScore]] = deque()

    def hold(self, score: TokenScore, begins: int) -> None:
        """begins  where its text begins in the content, in characters"""
        self._held.append((begins, score))

    def drop(self) -> None:
        """What is held has no text in the content."""
        self._held.clear()

    def take(self, told: int, *, all_of_it: bool) -> list[TokenScore]:
        """Those whose text has begun among the `told` characters; or all that is held."""
        taken = []
        while self._held and (all_of_it or self._held[0][0] < told):
            taken.append(self._held.popleft()[1])
        return taken
