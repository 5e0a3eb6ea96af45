"""A prompt's requests, and what a tokenizer adds to them: ids of words, whether reasoning is open.

Decided once, when the prompt is encoded; the engine and the detokenizer take it from the request.
Knows no threads.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from engine.constraints import Failure, failure_at_once
from engine.request import (
    ChatPrompt,
    CompiledGrammar,
    Int32Array,
    Prompt,
    ReasoningMarkers,
    Request,
    SamplingParams,
    Thinking,
)

# Ids from a prompt's end that a marker of reasoning and the whitespace behind it are found in.
_TAIL_IDS: Final = 32


class Speller(Protocol):
    """What is asked of `engine.tokenizer.Tokenizer`. Safe from any thread."""

    def token_id(self, text: str) -> int | None:
        """The id of a token that is written so, None where there is none."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def encode_word(self, text: str) -> tuple[int, ...]:
        """The ids of a text with nothing around it; empty where they are not the model's.

        Raises PromptError.
        """
        ...


def make_requests(
    speller: Speller,
    prompt: Prompt,
    prompt_ids: Int32Array,
    params: Mapping[int, SamplingParams],
    *,
    vocab_size: int,
    namespace: str = "",
    arrived_s: float = 0.0,
    grammar: CompiledGrammar | None = None,
) -> list[Request] | Failure:
    """The prompt's requests, or what would end them before their first token.

    params      by the requests' ids, at least one; they differ in their seeds alone
    vocab_size  the logits' width

    Raises PromptError for a bad word that cannot be encoded.
    """
    shared = next(iter(params.values()))
    markers = shared.reasoning
    bounds = thinking(speller, shared, has_grammar=grammar is not None)
    opened = markers is not None and begins_reasoning(speller, markers, prompt, prompt_ids)
    bad = bad_sequences(speller, shared.bad_words)
    requests = [
        Request(
            id=request_id,
            prompt_ids=prompt_ids,
            params=each,
            seed=each.draw_seed(),
            namespace=namespace,
            arrived_s=arrived_s,
            grammar=grammar,
            thinking=bounds,
            begins_reasoning=opened,
            bad_sequences=bad,
        )
        for request_id, each in params.items()
    ]
    return failure_at_once(requests[0], vocab_size) or requests


def bad_sequences(speller: Speller, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The sequences of ids that spell the words: each at a text's beginning, and behind a space.

    Most vocabularies write the two with different tokens. Raises PromptError.
    """
    found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            found[speller.encode_word(text)] = None
    found.pop((), None)
    return tuple(found)


def begins_reasoning(
    speller: Speller, markers: ReasoningMarkers, prompt: Prompt, prompt_ids: Int32Array
) -> bool:
    """Whether the output begins inside reasoning.

    As the prompt says, where it ends with one of the markers: some templates close the reasoning
    themselves where thinking is off (DeepSeek V3.1, Qwen3). Else as the model always does, unless
    it goes on with a message that was begun: there the marker that comes last in it counts.
    """
    if isinstance(prompt, ChatPrompt) and prompt.continue_final:
        text = _text(prompt.messages[-1].get("content"))
        return text.rfind(markers.opening) > text.rfind(markers.closing)
    tail = speller.decode(prompt_ids[-_TAIL_IDS:].tolist(), skip_special_tokens=False).rstrip()
    if tail.endswith(markers.closing):
        return False
    return markers.always or tail.endswith(markers.opening)


def thinking(speller: Speller, params: SamplingParams, *, has_grammar: bool) -> Thinking | None:
    """What bounds the reasoning, where something does and the model's markers are tokens."""
    markers, budget = params.reasoning, params.thinking_budget
    if markers is None or not (has_grammar or budget is not None):
        return None
    opening, closing = map(speller.token_id, (markers.opening, markers.closing))
    return None if opening is None or closing is None else Thinking(opening, closing, budget)


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get(part.get("type"), "")) for part in content)
    return content if isinstance(content, str) else ""
