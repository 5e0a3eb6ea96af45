"""Events as OpenAI's deltas, added up by openai-python: whatever is said twice shows."""

from typing import Any

import pytest
from openai.lib.streaming._deltas import accumulate_delta
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from httpd.parsing.output import (
    CallArguments,
    CallBegan,
    CallEnded,
    Content,
    OutputEvent,
)
from tests.http.parsing.outputs import cut, new_parser, run

TEXTS = {
    "hermes": '{0}\n<tool_call>\n{1}\n</tool_call>\n<tool_call>\n{2}\n</tool_call>',
    "llama3": "{0}\n<|python_tag|>{1}; {2}",
    "mistral": "{0}[TOOL_CALLS] [{1}, {2}]",
}  # fmt: skip
FIRST = '{"name": "add", "arguments": {"a": "}\\n", "b": 2}}'
SECOND = '{"name": "get_weather"}'


def delta(event: OutputEvent) -> dict[str, Any] | None:
    """The delta that says what an event says; None where nothing has to be said."""
    match event:
        case Content(text):
            return {"content": text}
        case CallBegan(index, id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnded():
            return None


def deltas(format: str, size: int) -> list[dict[str, Any]]:
    text = TEXTS[format].format("Let me see.", FIRST, SECOND)
    events = run(new_parser(format), cut(text, size))
    told = [said for event in events if (said := delta(event)) is not None]
    return [{"role": "assistant", "content": ""}, *told, {}]


def check_message(message: dict[str, Any]) -> None:
    assert message["role"] == "assistant"
    assert message["content"] == "Let me see."
    first, second = message["tool_calls"]
    assert first["function"]["name"] == "add"
    assert first["function"]["arguments"] == '{"a": "}\\n", "b": 2}'
    assert second["function"]["name"] == "get_weather"
    assert second["function"]["arguments"] == "{}"
    assert first["type"] == second["type"] == "function"
    assert first["id"] != second["id"]
    for call in (first, second):
        assert len(call["id"]) in (9, len("call_") + 24)


@pytest.mark.parametrize("format", TEXTS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_deltas_add_up(format: str, size: int) -> None:
    message: dict[Any, Any] = {}
    for said in deltas(format, size):
        message = accumulate_delta(message, said)
    check_message(message)


@pytest.mark.parametrize("format", TEXTS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_openai_streams_the_calls(format: str, size: int) -> None:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    told = deltas(format, size)
    done = []
    for said in told:
        finish = None if said else "tool_calls"
        choice = {"index": 0, "delta": said, "finish_reason": finish, "logprobs": None}
        chunk = {
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [choice],
        }  # fmt: skip
        events = state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        done += [e.name for e in events if e.type == "tool_calls.function.arguments.done"]
    assert done == ["add", "get_weather"]
    completion = state.get_final_completion()
    assert completion.choices[0].finish_reason == "tool_calls"
    check_message(completion.choices[0].message.model_dump())
