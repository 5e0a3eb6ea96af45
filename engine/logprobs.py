"""Log-probabilities that a step brings back, given to the requests that asked for them."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.plan import StepPlan
from engine.request import Int32Array, Logprobs
from engine.rows import Rows, RowState


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What one step worked out for rows that want it.

    indices  [n] which of the step's sampled tokens
    sampled  of those n tokens, with as many likeliest ids as any of them wants
    prompts  (row, of its next prompt tokens in order); a prompt's first token has none
    """

    indices: Int32Array
    sampled: Logprobs | None
    prompts: tuple[tuple[int, Logprobs], ...] = ()


def take_prompt_logprobs(logprobs: StepLogprobs, rows: Rows) -> None:
    """Keeps what belongs to prompts with their rows, until the prompt is complete."""
    for row, of_prompt in logprobs.prompts:
        if rows.state[row] != RowState.ENDED and not rows.started[row]:
            rows.prompt_logprobs[row].append(of_prompt)


def sampled_logprobs(
    logprobs: StepLogprobs, plan: StepPlan, rows: Rows
) -> Iterator[tuple[int, Logprobs]]:
    """(request id, of its token) for each request that wants it and has not ended."""
    if logprobs.sampled is None:
        return
    for index, sampled in enumerate(logprobs.indices.tolist()):
        row = int(plan.sample_rows[sampled])
        request = rows.requests[row]
        if rows.state[row] == RowState.ENDED or request is None:
            continue
        k = request.params.logprobs
        assert k is not None
        yield request.id, logprobs.sampled.of_token(index, k)
