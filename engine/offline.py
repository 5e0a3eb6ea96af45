"""Generation without a server: the same engine, called by the caller's own thread.

    from engine.offline import LLM
    from engine.request import SamplingParams

    with LLM("path/to/checkpoint") as llm:
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_new_tokens=50))

Knows neither threads nor HTTP.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.build import build_engine
from engine.config import EngineConfig
from engine.constraints import Failure
from engine.core import Engine
from engine.detokenizer import Detokenizer
from engine.errors import PromptError
from engine.preparation import make_requests
from engine.request import (
    FAILURES,
    ChatPrompt,
    Delta,
    Finish,
    Int32Array,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from engine.sampling_limits import check_params
from engine.tokenizer import Tokenizer

# Text, a chat's messages, or token ids.
PromptLike = str | Sequence[dict[str, Any]] | Sequence[int] | Prompt

# Fields of which an `Output` tells nothing, and what asks for nothing.
_NOT_TOLD: Final = {"echo": False, "logprobs": None, "prompt_logprobs": None}


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt. Where `error` is set, the rest is as far as it came."""

    text: str  # without reasoning, where `SamplingParams.reasoning` splits it off
    token_ids: tuple[int, ...]  # the ending EOS or stop id included
    finish_reason: str  # "stop", "length" or "error"
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that the prefix cache knew
    stop_match: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None
    reasoning: str = ""


class LLM:
    """A loaded model. Owned by the calling thread.

    An exception out of `generate`, an interrupt included, leaves a step half done: the model is
    closed then, and every later call says so.
    """

    def __init__(self, model: str | Path, *, progress: bool = True, **settings: Any) -> None:
        """model     a checkpoint's folder
        progress  show a bar while weights are loaded
        settings  fields of `EngineConfig`; without `target_itl_ms` nothing is done for latency

        Raises ModelError for a checkpoint that cannot be served, ValueError for a setting out of
        its range, or that only a server has.
        """
        config = EngineConfig(model=Path(model), **{"target_itl_ms": 0, **settings})
        for name in ("queue_timeout_s", "running_timeout_s"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} is {getattr(config, name)}; only a server has timeouts")
        self._tokenizer = Tokenizer.load(config.model)
        with _bar("MB", shown=progress) as bar:
            task = bar.add_task("loading", total=None)

            def on_bytes(done: int, total: int) -> None:
                bar.update(task, completed=done // 1_000_000, total=total // 1_000_000)

            self._engine = build_engine(config, on_bytes)
        self._detokenizer = Detokenizer(self._tokenizer)
        self._ids = itertools.count()
        self._closed = False

    @property
    def engine(self) -> Engine:
        """The engine underneath, for its facts and statistics."""
        return self._engine

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Output]:
        """One output for each prompt, in order; a prompt that fails does not fail the others.

        prompts  one or several: text, which is taken as it is; a chat's messages; or token ids
        params   for all prompts, or one for each; None: the defaults, as long as the context allows

        Raises TypeError for arguments of a wrong kind and ValueError for params out of their limits
        (engine.sampling_limits) or of which an `Output` tells nothing, before anything runs.
        """
        if self._closed:
            raise RuntimeError("this LLM is closed, or was interrupted")
        asked = _as_prompts(prompts)
        each = _as_params(params, len(asked), self._engine.facts.vocab_size)
        drafts = [_Draft() for _ in asked]
        try:
            waiting: dict[int, _Draft] = {}
            for prompt, one, draft in zip(asked, each, drafts, strict=True):
                self._submit(prompt, one, draft, waiting)
            with _bar("prompts", shown=progress) as bar:
                task = bar.add_task("generating", total=len(asked))
                bar.update(task, completed=len(asked) - len(waiting))
                while self._engine.has_work:
                    bar.advance(task, self._step(waiting))
        except BaseException:
            self.close()
            raise
        return [draft.output() for draft in drafts]

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        draft: "_Draft",
        waiting: dict[int, "_Draft"],
    ) -> None:
        try:
            prompt_ids = self._tokenizer.encode_prompt(prompt)
            draft.prompt_tokens = len(prompt_ids)
            if params is None:
                room = self._engine.facts.max_model_len - len(prompt_ids)
                params = SamplingParams(max_new_tokens=max(1, room))
            request = self._request(prompt, prompt_ids, params)
            self._engine.submit(request)
        except (PromptError, ValueError) as error:
            draft.finish, draft.error = Finish.ERROR, str(error)
        else:
            waiting[request.id] = draft

    def _request(self, prompt: Prompt, prompt_ids: Int32Array, params: SamplingParams) -> Request:
        """Raises PromptError, and ValueError where nothing meets all that is asked for."""
        made = make_requests(
            self._tokenizer,
            prompt,
            prompt_ids,
            {next(self._ids): params},
            vocab_size=self._engine.facts.vocab_size,
        )
        if isinstance(made, Failure):
            raise ValueError(made.message)
        return made[0]

    def _step(self, waiting: dict[int, "_Draft"]) -> int:
        """Runs one step; returns how many prompts it finished."""
        output = self._engine.step()
        if output is None:
            return 0
        text = self._detokenizer.on_step(output)
        for request_id in text.stop_matched:
            self._engine.stop_matched(request_id)
        ended = 0
        for delta in text.deltas:
            draft = waiting.get(delta.request_id)
            if draft is None:
                continue  # it failed before the engine heard that its stop string had ended it
            draft.add(delta)
            if delta.finish:
                del waiting[delta.request_id]
                ended += 1
        return ended

    def close(self) -> None:
        """Gives the model's memory back."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Draft:
    """An output while it grows. Owned by the calling thread."""

    __slots__ = (
        *("_ids", "_reasoning", "_text", "cached", "error", "finish", "prompt_tokens"),
        "stop_match",
    )

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self.finish = Finish.NONE
        self.prompt_tokens = self.cached = 0
        self.stop_match: str | int | None = None
        self.error: str | None = None

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._ids += delta.token_ids
        self.cached = delta.cached_tokens
        self.finish, self.stop_match, self.error = delta.finish, delta.stop_match, delta.error

    def output(self) -> Output:
        return Output(
            text="".join(self._text),
            token_ids=tuple(self._ids),
            finish_reason="error" if self.finish in FAILURES else self.finish.name.lower(),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            stop_match=self.stop_match,
            error=self.error,
            reasoning="".join(self._reasoning),
        )


def _as_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, ChatPrompt, TextPrompt, TokenPrompt)):
        return [_as_prompt(prompts)]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is a {type(prompts).__name__}, not a prompt or a list of prompts")
    if prompts and isinstance(prompts[0], (dict, int)):
        return [_as_prompt(prompts)]
    return [_as_prompt(prompt) for prompt in prompts]


def _as_prompt(prompt: Any) -> Prompt:
    match prompt:
        case str():
            return TextPrompt(prompt)
        case TextPrompt(text=str()):
            return prompt
        case TokenPrompt(token_ids=ids) if _are_ids(ids):
            return prompt
        case ChatPrompt(messages=messages) if _are_messages(messages):
            return prompt
    if _are_ids(prompt):
        return TokenPrompt(tuple(prompt))
    if _are_messages(prompt):
        return ChatPrompt(tuple(prompt))
    raise TypeError("a prompt is text, a list of messages or a list of token ids")


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(type(each) is int for each in prompt)


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(each, dict) for each in prompt)


def _as_params(params: Any, count: int, vocab_size: int) -> list[SamplingParams | None]:
    each = [params] * count if params is None or isinstance(params, SamplingParams) else [*params]
    if len(each) != count:
        raise ValueError(f"there are {len(each)} params for {count} prompts")
    for one in {id(one): one for one in each if one is not None}.values():
        _check(one, vocab_size)
    return [None if one is None else one.settled(vocab_size) for one in each]


def _check(params: Any, vocab_size: int) -> None:
    """Nobody has looked at these parameters before."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params has a {type(params).__name__}, not SamplingParams or None")
    check_params(params, vocab_size)
    for name, nothing in _NOT_TOLD.items():
        value = getattr(params, name)
        if value != nothing:
            raise ValueError(f"{name} is {value}; an Output has no room for it: leave it {nothing}")
    if not params.max_new_tokens:
        raise ValueError("max_new_tokens is 0, which only scores a prompt; an Output has no scores")


@contextmanager
def _bar(unit: str, *, shown: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        yield bar
