"""The scalar fields of a request: their types and limits, and which fields are refused by name.

pydantic checks types and ranges in strict mode: a boolean is no integer, "1" is no number. Explicit
nulls are dropped before, so null always means the default.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo

from engine.request import SamplingParams
from engine.sampling_limits import INT32_MAX, LIMITS
from httpd.errors import invalid, not_in_vocabulary, unsupported
from httpd.invalid import first_error
from httpd.text import shown

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128

MAX_TOOLS = 128
MAX_CHOICES = 128  # of one prompt
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 65_536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_SALT_CHARS = 256

MAX_UNKNOWN_NAMES = 16  # of one body, for the log


def _within(name: str) -> Any:
    """A field with the engine's own limits of a parameter."""
    return Field(ge=LIMITS[name].low, le=LIMITS[name].high)


TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStringList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[
    StopStringList,
    FailFast(),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=StopStringList | StopString,
    ),
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS), FailFast()]
Penalty = Annotated[float, _within("presence_penalty")]
TopLogprobs = Annotated[int, _within("logprobs")]
# A union's errors would name its branches; tools.py checks it.
ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})
]
LogitBias = Annotated[
    dict[str, Annotated[float, _within("logit_bias")]], Field(max_length=MAX_BIASES)
]
AllowedIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS), FailFast()]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
    Field(max_length=MAX_BAD_WORDS),
    FailFast(),
]


class StreamOptions(BaseModel):
    """`stream_options`; what it does not know, such as include_obfuscation, changes nothing."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class TemplateKwargs(BaseModel):
    """`chat_template_kwargs`: an allow-list, lest a request override what we give the template."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enable_thinking: bool | None = None


class Body(BaseModel):
    """A request's fields. What is in neither list nor a field is unknown: logged and ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class Fields(Body):
    """What every endpoint that generates takes; where it has another name, it is an alias there."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, _within("top_p")] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: Annotated[float, _within("min_p")] = 0.0
    seed: Annotated[int, _within("seed")] | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False  # SGLang's name for the same
    min_tokens: Annotated[int, _within("min_tokens")] = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, _within("repetition_penalty")] = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords = Field(default_factory=list)
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    priority: Annotated[int, _within("priority")] = 0  # higher starts first
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    stream: bool = False

    @abstractmethod
    def token_limit(self) -> int | None:
        """The most tokens to generate, None where the client does not say."""

    def sampling(self, max_new_tokens: int, vocab_size: int) -> SamplingParams:
        """The engine's parameters. Raises `Rejected` for an id out of the vocabulary."""
        self._check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        self._check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        if self.min_tokens > max_new_tokens:
            raise invalid(
                f"Invalid 'min_tokens': {self.min_tokens} is above the {max_new_tokens} tokens "
                "that the answer may have.",
                "min_tokens",
                "integer_above_max_value",
            )
        allowed = self.allowed_token_ids
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(dict.fromkeys(self.stop)),
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids)),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output or self.no_stop_trim,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._biases(vocab_size),
            allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
            bad_words=tuple(dict.fromkeys(self.bad_words)),
            priority=self.priority,
            routing_key=self.prompt_cache_key,
        ).settled(vocab_size)

    def _biases(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        for name in self.logit_bias:
            if not (name.isascii() and name.isdigit() and len(name) <= 10):
                raise invalid(
                    f"Invalid key in 'logit_bias': {shown(name)}. Keys are token ids, as strings.",
                    "logit_bias",
                    "invalid_token_id",
                )
        biases = {int(name): value for name, value in self.logit_bias.items()}
        outside = next((each for each in biases if each >= vocab_size), None)
        if outside is not None:
            raise not_in_vocabulary("logit_bias", outside, vocab_size)
        return tuple(biases.items())

    def _check_ids(self, name: str, ids: Iterable[int], vocab_size: int) -> None:
        for index, token_id in enumerate(ids):
            if token_id >= vocab_size:
                raise not_in_vocabulary(f"{name}[{index}]", token_id, vocab_size)


# Accepted, and without effect on the generated text.
IGNORED: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # where there are no tools
        "prediction",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    }
)

# Fields that would change the output, and the values of each that ask for nothing, as null does.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "echo": (False,),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "lora_path": ("",),
}


class ChoiceFields(Fields):
    """What chat and text completions share."""

    ignored = IGNORED
    neutral = NEUTRAL

    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    prompt_logprobs: TopLogprobs | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


class ChatFields(ChoiceFields):
    """A body of /v1/chat/completions; the messages are checked one by one in messages.py."""

    messages: Annotated[list[Any], Field(min_length=1)]
    chat_template_kwargs: TemplateKwargs | None = None
    thinking_budget: Annotated[int, _within("thinking_budget")] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True


class CompletionFields(ChoiceFields):
    """A body of /v1/completions; the prompt is checked in completions.py."""

    prompt: Any
    max_tokens: Annotated[int, _within("max_new_tokens")] | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None


AnyBody = TypeVar("AnyBody", bound=Body)


def read_fields(kind: type[AnyBody], body: dict[str, Any]) -> AnyBody:
    """The checked fields of `body`. Raises `Rejected` (400) naming the first that is wrong."""
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported(given, kind)
    options = given.get("stream_options")
    if isinstance(options, dict):
        given["stream_options"] = {k: v for k, v in options.items() if v is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise first_error(error) from None


def unknown_fields(kind: type[Body], body: dict[str, Any]) -> tuple[str, ...]:
    """The first names in `body` that mean nothing here, short and printable.

    Not all: a body has room for 200,000 whose shown part is the same, which nobody is to loop over
    on the HTTP loop, nor to keep while the request runs.
    """
    known = _names(kind)
    unknown = (
        name
        for name in body
        if name not in known and name not in kind.ignored and name not in kind.neutral
    )
    return tuple(shown(name) for name in islice(unknown, MAX_UNKNOWN_NAMES))


def _refuse_unsupported(given: dict[str, Any], kind: type[Body]) -> None:
    known = _names(kind)
    for name, neutral in kind.neutral.items():
        if name not in given or name in known:
            continue
        value = given[name]
        if not any(type(value) is type(ok) and value == ok for ok in neutral):
            only = " or ".join(shown(ok) for ok in (*neutral, None))
            raise unsupported(
                name,
                f"Unsupported value for '{name}': {shown(value)}. "
                f"This server does not have that feature; leave it out, or send {only}.",
            )


def field_name(name: str, field: FieldInfo) -> str:
    """A model's field as clients name it."""
    return field.alias or name


def _names(kind: type[Body]) -> set[str]:
    """The fields as clients name them."""
    return {field_name(name, field) for name, field in kind.model_fields.items()}
