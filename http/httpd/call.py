"""One checked request, as the endpoints hand it to the service and to the answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.request import Prompt, SamplingParams
from httpd.errors import unsupported
from httpd.fields import ChoiceFields, Fields, StreamOptions
from httpd.parsing.output import OutputParser, PlainText
from httpd.service import Constraint, Job, ModelCard

_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: seeds that are far from each other


@dataclass(frozen=True, slots=True)
class Telling:
    """How to tell what is generated."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool = False  # of what is generated
    top_logprobs: int = 0  # likeliest tokens beside each
    prompt_logprobs: int | None = None  # likewise of the prompt, in a list of their own
    echo: bool = False  # the text begins with the prompt's
    new_parser: Callable[[], OutputParser] = PlainText  # for each choice's content
    named_call: bool = False  # the one tool to be called was named: its end is "stop"
    parallel_calls: bool = True
    echoed: Mapping[str, Any] = field(default_factory=dict)  # what the answer repeats of the body


@dataclass(frozen=True, slots=True)
class Call:
    """What to generate, and how to tell it. Choice i * n + j is params[j] of jobs[i]."""

    jobs: tuple[Job, ...]  # one for each prompt, at least one; they differ in nothing else
    telling: Telling
    unknown_fields: tuple[str, ...]  # some names in the body that were ignored, as shown

    @classmethod
    def of(
        cls,
        fields: Fields,
        prompts: tuple[Prompt, ...],
        params: SamplingParams,
        telling: Telling,
        *,
        n: int = 1,
        constraint: Constraint | None,
        unknown_fields: tuple[str, ...],
    ) -> "Call":
        """The call for checked fields."""
        job = partial(
            Job,
            params=tuple(_seeded(params, index) for index in range(n)),
            max_tokens_given=fields.token_limit() is not None,
            constraint=constraint,
            namespace=fields.cache_salt,
        )
        return cls(tuple(job(prompt) for prompt in prompts), telling, unknown_fields)

    def within(self, caller: str) -> "Call":
        """The same, sharing prefixes with nobody but this caller; "" for with everybody."""
        if not caller:
            return self
        # The caller's part has one length, so that no salt makes up another caller's name.
        jobs = (replace(job, namespace=f"{caller}/{job.namespace}") for job in self.jobs)
        return replace(self, jobs=tuple(jobs))

    @property
    def params(self) -> tuple[SamplingParams, ...]:
        """Those of each job: n."""
        return self.jobs[0].params


def sampling(fields: Fields, card: ModelCard, default_tokens: int) -> SamplingParams:
    """The engine's parameters; `default_tokens` shrinks to fit, the client's limit does not.

    Raises `Rejected`.
    """
    limit = fields.token_limit()
    return fields.sampling(default_tokens if limit is None else limit, card.vocab_size)


def telling_of(fields: ChoiceFields) -> Telling:
    """What a completion's body says of the answer's form. Raises `Rejected`."""
    if fields.stream_options is not None and not fields.stream:
        raise unsupported(
            "stream_options", "Invalid 'stream_options': only allowed where 'stream' is true."
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise unsupported(
            "prompt_logprobs", "Unsupported 'prompt_logprobs' where 'stream' is true."
        )
    options = fields.stream_options or StreamOptions()
    return Telling(
        fields.stream,
        options.include_usage,
        options.continuous_usage_stats,
        prompt_logprobs=fields.prompt_logprobs,
    )


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Each choice has a seed of its own, which depends on the client's and its index alone."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index * _SEED_STEP) % (1 << 64))
