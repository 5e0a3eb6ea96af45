"""What is found out of a prompt and of words, with real tokenizers."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.constraints import Failure
from engine.preparation import bad_sequences, begins_reasoning, make_requests
from engine.request import ChatPrompt, ReasoningMarkers, SamplingParams, TextPrompt
from engine.tokenizer import Tokenizer
from tests.fakes_tokenizers import BOS, FAMILIES, shared, write_checkpoint

THINK = ReasoningMarkers("<think>", "</think>")
R1 = ReasoningMarkers("<think>", "</think>", always=True)

# How DeepSeek-V3.1's template opens and closes reasoning, and drops that of earlier turns.
V31 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% elif loop.last and not add_generation_prompt %}<｜Assistant｜></think>"
    "{{ message['content'] }}"
    "{% else %}<｜Assistant｜></think>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% else %}</think>{% endif %}"
    "{% endif %}"
)
TURNS = (
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
)


@pytest.fixture
def v31(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_checkpoint(tmp_path, chat_template=V31))


@pytest.mark.parametrize("markers", [THINK, R1])
@pytest.mark.parametrize(("thinks", "opened"), [(True, True), (False, False), (None, False)])
def test_a_template_opens_and_closes_reasoning(
    v31: Tokenizer, markers: ReasoningMarkers, thinks: bool | None, opened: bool
) -> None:
    kwargs = {} if thinks is None else {"enable_thinking": thinks}
    prompt = ChatPrompt(TURNS, kwargs)
    assert begins_reasoning(v31, markers, prompt, v31.encode_prompt(prompt)) is opened


@pytest.mark.parametrize(
    ("begun", "opened"),
    [
        ("It is", False),
        ("<think>Well", True),
        ("<think>Well</think>It is", False),
        ([{"type": "text", "text": "<think>"}, {"type": "text", "text": "Well"}], True),
    ],
)
def test_a_message_that_goes_on_says_it_itself(v31: Tokenizer, begun: object, opened: bool) -> None:
    """Also of a model that always thinks: what it goes on with is behind that."""
    prompt = ChatPrompt((TURNS[0], {"role": "assistant", "content": begun}), continue_final=True)
    assert begins_reasoning(v31, R1, prompt, v31.encode_prompt(prompt)) is opened


@pytest.mark.parametrize("family", FAMILIES)
def test_words_are_spelled_with_and_without_a_space(family: str) -> None:
    tokenizer = Tokenizer(shared(family))
    found = bad_sequences(tokenizer, ["the", " the", "mat"])
    assert len(set(found)) == len(found) and () not in found
    for text in ("the", " the", "mat", " mat"):
        assert tuple(shared(family).encode(text, add_special_tokens=False).ids) in found


def test_a_word_of_spaces_is_itself_and_special_tokens_are_words() -> None:
    tokenizer = Tokenizer(shared("byte_level"))
    backend = tokenizer.backend
    spaces = tuple(backend.encode("  ", add_special_tokens=False).ids)
    assert bad_sequences(tokenizer, ["  "]) == (spaces,)
    assert (backend.token_to_id(BOS),) in bad_sequences(tokenizer, [BOS])


def test_a_word_that_the_model_cannot_say_is_none() -> None:
    """A tokenizer may have more ids than the logits: none of them may reach a table of these.

    PYSEC-2026-4000.
    """
    backend = shared("byte_level")
    tokenizer = Tokenizer(backend, vocab_size=backend.token_to_id(BOS))
    assert bad_sequences(tokenizer, [BOS, "a"]) == bad_sequences(tokenizer, ["a"])


def test_the_requests_of_a_prompt_differ_in_id_and_seed_alone() -> None:
    tokenizer, prompt = Tokenizer(shared("byte_level")), TextPrompt("the cat")
    asked = SamplingParams(max_new_tokens=3, bad_words=("mat",), reasoning=R1)
    made = make_requests(
        tokenizer,
        prompt,
        tokenizer.encode_prompt(prompt),
        {7: replace(asked, seed=1), 9: replace(asked, seed=-1)},
        vocab_size=tokenizer.vocab_size,
        namespace="mine",
        arrived_s=2.5,
    )
    assert isinstance(made, list)
    first, second = made
    assert [(each.id, each.seed) for each in made] == [(7, 1), (9, 2**64 - 1)]
    for each in made:
        assert (each.namespace, each.arrived_s, each.thinking) == ("mine", 2.5, None)
        assert each.bad_sequences == bad_sequences(tokenizer, ["mat"])
        assert each.begins_reasoning and each.prompt_ids is first.prompt_ids
    assert first.params == replace(second.params, seed=1)


def test_a_prompt_whose_output_cannot_begin_has_no_requests() -> None:
    tokenizer, prompt = Tokenizer(shared("byte_level")), TextPrompt("the cat")
    (only,) = {ids for ids in bad_sequences(tokenizer, ["a"]) if len(ids) == 1 and ids[0] < 200}
    params = SamplingParams(max_new_tokens=3, bad_words=("a",), allowed_token_ids=only)
    prompt_ids = tokenizer.encode_prompt(prompt)
    made = make_requests(
        tokenizer, prompt, prompt_ids, {7: params}, vocab_size=tokenizer.vocab_size
    )
    assert isinstance(made, Failure) and "allowed_token_ids" in made.message
