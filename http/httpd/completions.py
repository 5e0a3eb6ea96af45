"""The body of /v1/completions, and one choice of its answer."""

from dataclasses import replace
from typing import Any

from engine.request import Delta, Prompt, PromptText, TextPrompt, TokenPrompt, TokenScore
from httpd.answer import End
from httpd.call import Call, Telling, sampling, telling_of
from httpd.conversation import check_name
from httpd.errors import invalid, not_in_vocabulary, wrong_type
from httpd.fields import CompletionFields, read_fields, unknown_fields
from httpd.logprobs import CompletionLogprobs, joined, prompt_logprobs
from httpd.service import ModelCard
from httpd.strict_json import parse_object
from httpd.structured import read_constraint
from httpd.text import json_string, json_text, well_formed

ID_PREFIX = "cmpl-"
OBJECT = "text_completion"  # of a stream's chunks too
DEFAULT_MAX_TOKENS = 16  # the OpenAI API's own
MAX_PROMPTS = 128

_PROMPT_FORMS = "a string, an array of token ids, or an array of these"


def parse_completion(body: bytes, card: ModelCard) -> Call:
    """The checked call. Pure, so that a large body can be read on another thread.

    Raises `Rejected`: 400, or 404 for another model.
    """
    raw = parse_object(body)
    fields = read_fields(CompletionFields, raw)
    check_name(card, fields.model)
    _check_combination(fields)
    params = replace(
        sampling(fields, card, DEFAULT_MAX_TOKENS),
        echo=fields.echo,
        logprobs=fields.logprobs,
        prompt_logprobs=_most(fields.logprobs if fields.echo else None, fields.prompt_logprobs),
    )
    telling = replace(
        telling_of(fields),
        logprobs=fields.logprobs is not None,
        top_logprobs=fields.logprobs or 0,
        echo=fields.echo,
    )
    return Call.of(
        fields,
        _prompts(fields.prompt, card.vocab_size),
        params,
        telling,
        n=fields.n,
        constraint=read_constraint(fields),
        unknown_fields=unknown_fields(CompletionFields, raw),
    )


def _check_combination(fields: CompletionFields) -> None:
    if fields.token_limit() == 0 and not fields.echo:
        raise invalid(
            "Invalid 'max_tokens': 0 is below the minimum of 1, unless 'echo' is true.",
            "max_tokens",
            "integer_below_min_value",
        )


def _most(*wanted: int | None) -> int | None:
    """As many as the one who wants most; None where nobody does."""
    return max((each for each in wanted if each is not None), default=None)


def _prompts(prompt: Any, vocab_size: int) -> tuple[Prompt, ...]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > MAX_PROMPTS:
            raise invalid(
                f"Invalid 'prompt': it must be an array of at most {MAX_PROMPTS} prompts, not "
                f"{len(prompt)}.",
                "prompt",
                "array_above_max_length",
            )
        return tuple(_prompt(each, f"prompt[{i}]", vocab_size) for i, each in enumerate(prompt))
    return (_prompt(prompt, "prompt", vocab_size),)


def _prompt(prompt: Any, path: str, vocab_size: int) -> Prompt:
    if isinstance(prompt, str) and prompt:
        return TextPrompt(prompt)
    if isinstance(prompt, list) and prompt:
        return TokenPrompt(read_token_ids(prompt, path, vocab_size))
    if prompt in ("", []):
        raise invalid(f"Invalid '{path}': it is empty.", path, "empty_prompt")
    raise wrong_type(path, _PROMPT_FORMS, prompt)


def read_token_ids(ids: list[Any], path: str, vocab_size: int) -> tuple[int, ...]:
    """The ids, at least one, each in the vocabulary. Raises `Rejected` (400)."""
    # Two passes without a Python-level loop body: prompts of a million ids are legal JSON.
    if set(map(type, ids)) != {int}:
        index = next(i for i, token_id in enumerate(ids) if type(token_id) is not int)
        raise wrong_type(f"{path}[{index}]", "a token id (an integer)", ids[index])
    if min(ids) < 0 or max(ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise not_in_vocabulary(f"{path}[{index}]", ids[index], vocab_size)
    return tuple(ids)


class CompletionChoice:
    """Text and logprobs of one choice. Owned by its HTTP loop."""

    def __init__(self, index: int, telling: Telling) -> None:
        self.is_over = False
        self._index = index
        self._start = f'{{"index":{index},"text":'
        self._telling = telling
        self._logprobs = CompletionLogprobs(telling.top_logprobs) if telling.logprobs else None
        self._scores: list[TokenScore] = []  # not yet told
        self._end: End | None = None
        # The text, where the answer is not a stream.
        self._text: list[str] = []
        self._pieces: list[dict[str, Any]] = []
        self._prompt: PromptText | None = None

    # A stream

    def opening(self) -> list[str]:
        """Nothing: there is no role to tell."""
        return []

    def chunks(self, delta: Delta) -> list[str]:
        """The echoed prompt, some text, the end: each in a chunk of its own."""
        told = []
        if delta.prompt is not None and self._telling.echo:
            piece = None if self._logprobs is None else self._logprobs.prompt(delta.prompt)
            told.append(self._chunk(delta.prompt.text, piece))
        self._scores += _scores(delta)
        end = End.of(delta)
        if delta.text:
            told.append(self._chunk(delta.text, self._take_piece()))
        if end is not None:
            self.is_over = True
            told.append(self._chunk("", self._take_piece(), end))
        return told

    def _chunk(self, text: str, logprobs: dict[str, Any] | None, end: End | None = None) -> str:
        finish = '"finish_reason":null}' if end is None else json_text(end.fields())[1:]
        return f'{self._start}{json_string(text)},"logprobs":{json_text(logprobs)},{finish}'

    def _take_piece(self) -> dict[str, Any] | None:
        if self._logprobs is None or not self._scores:
            return None
        piece, self._scores = self._logprobs.piece(self._scores), []
        return piece

    # A whole answer

    def take(self, delta: Delta) -> None:
        self._prompt = self._prompt or delta.prompt
        if delta.prompt is not None and self._telling.echo:
            self._text.append(delta.prompt.text)
            if self._logprobs is not None:
                self._pieces.append(self._logprobs.prompt(delta.prompt))
        self._scores += _scores(delta)
        self._text.append(delta.text)
        self._end = End.of(delta)
        self.is_over = self._end is not None

    def whole(self) -> dict[str, Any]:
        """The choice."""
        assert self._end is not None
        piece = self._take_piece()
        pieces = [*self._pieces, *([] if piece is None else [piece])]
        logprobs = None if self._logprobs is None else joined(pieces)
        text = well_formed("".join(self._text))
        whole = {"index": self._index, "text": text, "logprobs": logprobs, **self._end.fields()}
        top = self._telling.prompt_logprobs
        if top is not None:
            assert self._prompt is not None
            whole["prompt_logprobs"] = prompt_logprobs(self._prompt, top)
        return whole

    def beside(self) -> dict[str, Any]:
        return {}


def _scores(delta: Delta) -> tuple[TokenScore, ...]:
    """A completion tells of all tokens, the ending id among them, as scoring clients count on."""
    return delta.scores if delta.ending is None else (*delta.scores, delta.ending)
