"""The tokenizer threads: a checked prompt becomes requests for the engine, or a refusal.

Guarantees: each submission is answered once; an acceptance follows its requests' push. Knows no
HTTP beyond the fields of a refusal.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Protocol

from engine.constraints import Failure
from engine.errors import PromptError
from engine.preparation import Speller, make_requests
from engine.request import ChatPrompt, Int32Array, Prompt, Request
from httpd.service import Job
from runtime.channel import Receiver, Sender
from runtime.inbox import Inbox, Wakeup
from runtime.messages import Accepted, Refused, Submission, Verdict
from runtime.worker import TICK_S, Pulse, Stopped

log = logging.getLogger(__name__)


class Encoder(Speller, Protocol):
    """What is asked of `engine.tokenizer.Tokenizer`. Safe from any thread."""

    def encode_prompt(self, prompt: Prompt) -> Int32Array:
        """Raises PromptError."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerRings:
    """One tokenizer thread's ends."""

    wakeup: Wakeup
    submissions: tuple[Receiver[Submission], ...]  # one for each HTTP loop
    requests: Sender[Request]
    verdicts: tuple[Sender[Verdict], ...]  # likewise


class TokenizerLoop:
    """Encodes submissions, one of each HTTP loop in turn. Owned by its tokenizer thread."""

    def __init__(
        self, encoder: Encoder, max_model_len: int, vocab_size: int, rings: TokenizerRings
    ) -> None:
        """
        max_model_len  prompt + output, tokens
        vocab_size     ids below it are the model's
        """
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._rings = rings
        self._inbox = Inbox(rings.wakeup, rings.submissions)

    def run(self, pulse: Pulse) -> None:
        """The thread's body."""
        while not pulse.is_stopping:
            pulse.beat()
            if self._inbox.is_empty:
                self._inbox.wait(TICK_S)
            for ring, verdicts in zip(self._rings.submissions, self._rings.verdicts, strict=True):
                submission = ring.try_pop()
                if submission is not None:
                    self._answer(submission, verdicts, pulse)

    def _answer(self, submission: Submission, verdicts: Sender[Verdict], pulse: Pulse) -> None:
        made = self._encode(submission)
        encoded_s = time.monotonic()
        verdict: Verdict
        if isinstance(made, Refused):
            verdict = made
        else:
            for request in made:
                pulse.push(self._rings.requests, request)
            verdict = Accepted(submission.ids, len(made[0].prompt_ids), encoded_s)
        pulse.push(verdicts, verdict)

    def _encode(self, submission: Submission) -> list[Request] | Refused:
        """The submission's requests, which share the prompt's ids."""
        try:
            return self._encoded(submission)
        except PromptError as error:
            return Refused(submission.ids, 400, error.message, error.param, "invalid_prompt")
        except (Stopped, SystemExit, KeyboardInterrupt):
            raise
        except BaseException:  # a panic in Rust is no Exception, and this prompt's alone
            log.exception("request %d cannot be encoded", submission.ids[0])
            message = "The server failed to encode this prompt."
            return Refused(submission.ids, 500, message, code="internal_error")

    def _encoded(self, submission: Submission) -> list[Request] | Refused:
        """As `_encode`. Raises PromptError, or whatever a tokenizer raises."""
        encoder, job = self._encoder, submission.job
        prompt_ids = encoder.encode_prompt(job.prompt)
        max_new_tokens = self._fitted(job, len(prompt_ids))
        if max_new_tokens is None:
            return self._too_long(submission, len(prompt_ids))
        made = make_requests(
            encoder,
            job.prompt,
            prompt_ids,
            {
                request_id: replace(params, max_new_tokens=max_new_tokens)
                for request_id, params in zip(submission.ids, job.params, strict=True)
            },
            vocab_size=self._vocab_size,
            namespace=job.namespace,
            arrived_s=submission.arrived_s,
            grammar=submission.grammar,
        )
        if isinstance(made, Failure):
            return Refused(submission.ids, 400, made.message, code="unsatisfiable")
        return made

    def _fitted(self, job: Job, prompt_tokens: int) -> int | None:
        """A number of new tokens that the context has room for; None: it has none."""
        room, wanted = self._max_model_len - prompt_tokens, job.params[0].max_new_tokens
        if not job.max_tokens_given:
            return min(room, wanted) if room > 0 else None
        return wanted if wanted <= room else None

    def _too_long(self, submission: Submission, prompt_tokens: int) -> Refused:
        job = submission.job
        wanted = job.params[0].max_new_tokens if job.max_tokens_given else 1
        message = (
            f"This model's maximum context length is {self._max_model_len} tokens, but "
            f"{prompt_tokens + wanted} are asked for: {prompt_tokens} in the prompt and "
            f"{'' if job.max_tokens_given else 'at least '}{wanted} for the answer. "
            "Shorten the prompt or lower the number of new tokens."
        )
        param = "messages" if isinstance(job.prompt, ChatPrompt) else "prompt"
        return Refused(submission.ids, 400, message, param, "context_length_exceeded")
