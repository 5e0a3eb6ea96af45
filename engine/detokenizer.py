"""Step outputs to deltas: the text that each response may send now, and why a response ends.

Guarantees
- The texts of a response's deltas joined are the decoding of all its output ids, less the ending
  EOS or stop id, cut where a stop string begins. Where reasoning is split off, the markers and the
  whitespace beside them (see reasoning.py) are dropped, and stop strings are looked for in content
  alone: a client that asks for one thinks of the answer.
- Every output id is counted, that ending id and the one that completes a stop string included; none
  after.
- A stop string goes before whatever else ends a response in the same step. The text of the first
  `min_tokens` tokens is no part of one.

The engine hears of a stop string a step or two late: ids that come for a response that has ended
are dropped. Knows neither torch, threads nor HTTP; offline use calls it as the detokenizer thread
does.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from engine.reasoning import ReasoningSplitter
from engine.request import (
    FAILURES,
    Delta,
    Finish,
    Logprobs,
    PromptText,
    Started,
    StepOutput,
    TokenScore,
)
from engine.stopping import StopStrings
from engine.text_decoder import TextDecoder, TextDecoders
from engine.token_scores import HeldScores, TokenScores
from engine.tokenizer import Tokenizer

_FINISHES: Final = tuple(Finish)  # by value; calling `Finish` is slow


@dataclass(frozen=True, slots=True)
class StepText:
    """What one step gives to the responses, and what the engine does not know yet."""

    deltas: tuple[Delta, ...]  # in the step's order
    stop_matched: tuple[int, ...]  # requests to end: their text holds a stop string


class Detokenizer:
    """Decode state of every response that is under way. Owned by the detokenizer thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._decoders = TextDecoders(tokenizer.backend)
        self._scores = TokenScores(self._decoders)
        self._responses: dict[int, _Response] = {}

    def __len__(self) -> int:
        """Responses under way."""
        return len(self._responses)

    def on_step(self, output: StepOutput) -> StepText:
        """One delta for each id and each end of a response under way.

        An abort or an error also ends a request that is not: it never started, or its stop string
        ended it before the engine heard of it.
        """
        for started in output.started:
            self._responses[started.request.id] = self._open(started)
        errors, logprobs = dict(output.errors), dict(output.logprobs)
        deltas: list[Delta] = []
        stop_matched: list[int] = []
        for request_id, token_id, finish in zip(
            output.request_ids.tolist(),
            output.token_ids.tolist(),
            output.finishes.tolist(),
            strict=True,
        ):
            response = self._responses.get(request_id)
            if response is not None:
                delta = response.advance(token_id, _FINISHES[finish], errors.get(request_id))
                if response.tells_more:
                    delta = self._with_more(delta, response, logprobs.get(request_id))
                deltas.append(delta)
                if delta.finish:
                    del self._responses[request_id]
                    if not finish:
                        stop_matched.append(request_id)
            elif finish == Finish.ABORT or finish in FAILURES:
                deltas.append(_bare_end(request_id, _FINISHES[finish], errors.get(request_id)))
        return StepText(tuple(deltas), tuple(stop_matched))

    def _open(self, started: Started) -> "_Response":
        params = started.request.params
        skip, markers = params.skip_special_tokens, params.reasoning
        if markers is None:
            return _Response(started, self._decoders.new(skip_special_tokens=skip))
        kept = (markers.opening, markers.closing)
        decoder = self._decoders.new(skip_special_tokens=skip, kept=kept)
        splitter = ReasoningSplitter(markers, opened=started.request.begins_reasoning)
        return _Response(started, decoder, splitter)

    def _with_more(self, delta: Delta, response: "_Response", told: Logprobs | None) -> Delta:
        """With the logprobs and the prompt that few requests ask for."""
        ending: TokenScore | None = None
        if told is not None and delta.token_ids:
            (score,) = self._scores.scores(delta.token_ids, told)
            ending = response.take_score(score)
        return replace(
            delta,
            scores=tuple(response.told_scores(delta)),
            ending=ending,
            prompt=self._take_prompt(response),
        )

    def _take_prompt(self, response: "_Response") -> PromptText | None:
        """The prompt's text and scores, the first time only."""
        started, response.started = response.started, None
        if started is None:
            return None
        params, ids = started.request.params, started.request.prompt_ids
        text = ""
        if params.echo:
            skip = params.skip_special_tokens
            text = self._backend.decode(ids.tolist(), skip_special_tokens=skip)
        first = self._scores.text(int(ids[0]), math.nan)
        told = started.prompt_logprobs
        scores = [] if told is None else self._scores.scores(ids[1:], told)
        return PromptText(text, first, tuple(scores))


class _Response:
    """One response's text so far, as far as it is not sent. Owned by the detokenizer thread."""

    __slots__ = (
        *("_begins", "_cached", "_completion", "_content", "_decoder", "_ended_by_id"),
        *("_host_tokens", "_id", "_params", "_scores", "_splitter", "_stop_ids", "_stops"),
        *("_told", "started", "tells_more"),
    )

    def __init__(
        self, started: Started, decoder: TextDecoder, splitter: ReasoningSplitter | None = None
    ) -> None:
        """splitter  None: all text is content"""
        params = started.request.params
        self._id = started.request.id
        self._params = params
        tells_prompt = params.echo or params.prompt_logprobs is not None
        self.tells_more = tells_prompt or params.logprobs is not None
        self.started = started if tells_prompt else None  # until the prompt is told
        self._cached, self._host_tokens = started.cached_tokens, started.host_tokens
        self._completion = 0  # tokens
        self._decoder = decoder
        self._splitter = splitter
        include = params.include_stop
        self._stops = StopStrings(params.stop, include=include) if params.stop else None
        self._stop_ids = params.stop_token_ids
        # Characters of the content: before the last token, with it, and as far as they are told.
        self._begins = self._content = self._told = 0
        self._ended_by_id = False  # by the last token, which is no part of the text
        self._scores = HeldScores()

    def advance(self, token_id: int, finish: Finish, error: str | None) -> Delta:
        """Takes one id, or -1 for an end without one."""
        params = self._params
        if not params.max_new_tokens:  # it scores its prompt: what was drawn is nobody's
            token_id, finish = -1, Finish.LENGTH if finish else finish
        token_ids = (token_id,) if token_id >= 0 else ()
        self._completion += len(token_ids)
        text = ""
        self._ended_by_id = finish == Finish.STOP and not params.include_stop
        if token_ids and not self._ended_by_id:
            text = self._decoder.push(token_id)
        if finish:
            text += self._decoder.finish()
        reasoning, reasoning_tokens = "", 0
        if self._splitter is not None:
            reasoning, text = _split(self._splitter, text, len(token_ids), finish)
            reasoning_tokens = self._splitter.tokens
        self._begins, self._content = self._content, self._content + len(text)
        match: str | int | None = None
        if self._stops is not None and self._completion > params.min_tokens:
            text = self._stops.feed(text)
            match = self._stops.match
            if match is None and finish:
                text += self._stops.flush()
        if match is not None:
            finish, error = Finish.STOP, None
        elif finish == Finish.STOP and token_id in self._stop_ids:
            match = token_id
        self._told += len(text)
        # In the order of its fields: names would cost a microsecond of every token.
        return Delta(
            self._id, text, token_ids, finish, self._completion, self._cached, match, error,
            reasoning, reasoning_tokens, self._host_tokens,
        )  # fmt: skip

    def take_score(self, score: TokenScore) -> TokenScore | None:
        """Takes the last token's score; gives it back where that token ended the text."""
        if self._ended_by_id:
            return score
        self._scores.hold(score, self._begins)
        return None

    def told_scores(self, delta: Delta) -> list[TokenScore]:
        """The scores that go with a delta, the last that `advance` made."""
        if self._splitter is not None and self._splitter.is_hiding:
            self._scores.drop()
        is_cut = isinstance(delta.stop_match, str)
        return self._scores.take(self._told, all_of_it=bool(delta.finish) and not is_cut)


def _split(splitter: ReasoningSplitter, text: str, tokens: int, finish: Finish) -> tuple[str, str]:
    """(reasoning, content) that a step adds, with all that was held where the text is over."""
    reasoning, content = splitter.feed(text, tokens)
    if finish:
        last_reasoning, last_content = splitter.finish()
        reasoning, content = reasoning + last_reasoning, content + last_content
    return reasoning, content


def _bare_end(request_id: int, finish: Finish, error: str | None) -> Delta:
    return Delta(
        request_id=request_id,
        text="",
        token_ids=(),
        finish=finish,
        completion_tokens=0,
        cached_tokens=0,
        error=error,
    )
