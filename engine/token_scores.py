"""Log-probabilities of ids, as a client sees them: with each token's own text and bytes."""

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
