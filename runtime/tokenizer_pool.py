"""The tokenizer threads: a checked prompt becomes requests for the engine, or a refusal.

Guarantees: each submission is answered once; an acceptance follows its requests' push. Knows no
HTTP beyond the fields of a refusal.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Final, Protocol

from engine.errors import PromptError
from engine.request import ChatPrompt, Int32Array, Prompt, Request, Thinking
from runtime.channel import Receiver, Sender
from runtime.inbox import Inbox, Wakeup
from runtime.messages import Accepted, Refused, Submission, Verdict
from runtime.worker import TICK_S, Pulse, Stopped

log = logging.getLogger(__name__)

_MARKER_AND_SPACE: Final = 3  # tokens: what opens reasoning, and line breaks behind it


class Encoder(Protocol):
    """What is asked of `engine.tokenizer.Tokenizer`. Safe from any thread."""

    def encode_prompt(self, prompt: Prompt) -> Int32Array:
        """Raises PromptError."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of a token that is written so, None where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerRings:
    """One tokenizer thread's ends."""

    wakeup: Wakeup
    submissions: Receiver[Submission]
    requests: Sender[Request]
    verdicts: Sender[Verdict]


class TokenizerLoop:
    """Encodes submissions, one after the other. Owned by its tokenizer thread."""

    def __init__(self, encoder: Encoder, max_model_len: int, rings: TokenizerRings) -> None:
        """max_model_len  prompt + output, tokens"""
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._rings = rings
        self._inbox = Inbox(rings.wakeup, [rings.submissions])

    def run(self, pulse: Pulse) -> None:
        """The thread's body."""
        while not pulse.is_stopping:
            pulse.beat()
            submission = self._rings.submissions.try_pop()
            if submission is None:
                self._inbox.wait(TICK_S)
            else:
                self._answer(submission, pulse)

    def _answer(self, submission: Submission, pulse: Pulse) -> None:
        made = self._encode(submission)
        verdict: Verdict
        if isinstance(made, Refused):
            verdict = made
        else:
            for request in made:
                pulse.push(self._rings.requests, request)
            verdict = Accepted(submission.ids, len(made[0].prompt_ids), time.monotonic())
        pulse.push(self._rings.verdicts, verdict)

    def _encode(self, submission: Submission) -> list[Request] | Refused:
        """The submission's requests, which share the prompt's ids."""
        try:
            prompt_ids = self._encoder.encode_prompt(submission.prompt)
        except PromptError as error:
            return Refused(submission.ids, 400, error.message, error.param, "invalid_prompt")
        except (Stopped, SystemExit, KeyboardInterrupt):
            raise
        except BaseException:  # a panic in Rust is no Exception, and this prompt's alone
            log.exception("request %d cannot be encoded", submission.ids[0])
            message = "The server failed to encode this prompt."
            return Refused(submission.ids, 500, message, code="internal_error")
        max_new_tokens = self._fitted(submission, len(prompt_ids))
        if max_new_tokens is None:
            return self._too_long(submission, len(prompt_ids))
        thinking = self._thinking(submission, prompt_ids)
        return [
            Request(
                id=request_id,
                prompt_ids=prompt_ids,
                params=replace(params, max_new_tokens=max_new_tokens),
                seed=params.draw_seed(),
                arrived_s=submission.arrived_s,
                grammar=submission.grammar,
                namespace=submission.namespace,
                thinking=thinking,
            )
            for request_id, params in zip(submission.ids, submission.params, strict=True)
        ]

    def _thinking(self, submission: Submission, prompt_ids: Int32Array) -> Thinking | None:
        """What bounds the reasoning, where something does and the model's markers are tokens."""
        params = submission.params[0]
        markers, budget = params.reasoning, params.thinking_budget
        if markers is None or (submission.grammar is None and budget is None):
            return None
        opening, closing = map(self._encoder.token_id, (markers.opening, markers.closing))
        if opening is None or closing is None:
            return None
        marked = [token for token in prompt_ids[-_MARKER_AND_SPACE:] if token in (opening, closing)]
        opened = markers.always or (bool(marked) and marked[-1] == opening)
        return Thinking(opening, closing, opened, budget)

    def _fitted(self, submission: Submission, prompt_tokens: int) -> int | None:
        """A number of new tokens that the context has room for; None: it has none."""
        room, wanted = self._max_model_len - prompt_tokens, submission.params[0].max_new_tokens
        if not submission.max_tokens_given:
            return min(room, wanted) if room > 0 else None
        return wanted if wanted <= room else None

    def _too_long(self, submission: Submission, prompt_tokens: int) -> Refused:
        wanted = submission.params[0].max_new_tokens if submission.max_tokens_given else 1
        message = (
            f"This model's maximum context length is {self._max_model_len} tokens, but "
            f"{prompt_tokens + wanted} are asked for: {prompt_tokens} in the prompt and "
            f"{'' if submission.max_tokens_given else 'at least '}{wanted} for the answer. "
            "Shorten the prompt or lower the number of new tokens."
        )
        param = "messages" if isinstance(submission.prompt, ChatPrompt) else "prompt"
        return Refused(submission.ids, 400, message, param, "context_length_exceeded")
