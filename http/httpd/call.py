"""One checked request, as the endpoints hand it to the service and to the answer."""

from dataclasses import dataclass

from engine.request import Prompt, SamplingParams
from httpd.fields import Fields, StreamOptions
from httpd.service import ModelCard


@dataclass(frozen=True, slots=True)
class Telling:
    """How to tell what is generated."""

    stream: bool
    include_usage: bool
    continuous_usage: bool


@dataclass(frozen=True, slots=True)
class Call:
    """What to generate, and how to tell it."""

    prompt: Prompt
    params: SamplingParams
    max_tokens_given: bool
    telling: Telling
    unknown_fields: tuple[str, ...]  # some names in the body that were ignored, as shown

    @classmethod
    def of(
        cls,
        fields: Fields,
        prompt: Prompt,
        card: ModelCard,
        *,
        default_tokens: int,
        unknown_fields: tuple[str, ...],
    ) -> "Call":
        """The call for checked fields; `default_tokens` shrinks to fit, the client's limit not."""
        limit = fields.token_limit()
        options = fields.stream_options or StreamOptions()
        return cls(
            prompt=prompt,
            params=fields.sampling(limit or default_tokens, card.vocab_size),
            max_tokens_given=limit is not None,
            telling=Telling(
                stream=fields.stream,
                include_usage=options.include_usage,
                continuous_usage=options.continuous_usage_stats,
            ),
            unknown_fields=unknown_fields,
        )
