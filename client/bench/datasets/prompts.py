"""Random prompts of a given length, as token ids or as text."""

import random
from dataclasses import dataclass
from typing import Final

Range = tuple[int, int]  # smallest and largest, both included

# Common English words, each one token in most vocabularies where a space goes before it.
_WORDS: Final = tuple(
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education".split()
)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of random tokens."""

    as_ids: bool
    vocab: int = 1000  # ids are below this; small, since every vocabulary has so many

    def make(self, dice: random.Random, tokens: int) -> tuple[int, ...] | str:
        """`tokens` ids; or as many words, which are about as many tokens."""
        if self.as_ids:
            return tuple(dice.randrange(self.vocab) for _ in range(tokens))
        return " ".join(dice.choice(_WORDS) for _ in range(tokens))


def joined(*prompts: tuple[int, ...] | str) -> tuple[int, ...] | str:
    """One prompt of several of a kind."""
    if isinstance(prompts[0], str):
        return " ".join(str(prompt) for prompt in prompts)
    return tuple(token for prompt in prompts for token in prompt)  # type: ignore[misc]
