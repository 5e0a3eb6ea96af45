"""One choice of a chat completion: role, content, reasoning, tool calls and logprobs."""

from typing import Any

from engine.request import Delta, PromptText, TokenScore
from httpd.answer import End
from httpd.call import Telling
from httpd.chat_output import ChatEvent, ChatOutput, Reasoning
from httpd.logprobs import chat_logprobs, prompt_logprobs
from httpd.parsing.output import CallArguments, CallBegan, Content
from httpd.text import json_string, json_text, well_formed

ID_PREFIX = "chatcmpl-"
OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"


class ChatChoice:
    """Deltas and the message of one choice. Owned by its HTTP loop."""

    def __init__(self, index: int, telling: Telling) -> None:
        self._index = index
        self._telling = telling
        self._output = ChatOutput(telling)
        self._start = f'{{"index":{index},"delta":'
        self._scores: list[TokenScore] = []  # not yet told
        # The message, where the answer is not a stream.
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._prompt: PromptText | None = None

    @property
    def is_over(self) -> bool:
        return self._output.is_over

    # A stream

    def opening(self) -> list[str]:
        """The role, said once: clients add up what each delta brings."""
        return [self._chunk('{"role":"assistant","content":""}')]

    def chunks(self, delta: Delta) -> list[str]:
        """One chunk for each thing that is new, and one for the end."""
        self._scores += delta.scores
        events = self._output.take(delta)
        told = [self._chunk(each) for event in events if (each := _wire(event))]
        if self.is_over:
            told.append(self._chunk("{}", self._end()))
        return told

    def _chunk(self, delta: str, end: End | None = None) -> str:
        logprobs = "null"
        if self._scores:
            logprobs, self._scores = json_text(chat_logprobs(self._scores)), []
        finish = '"finish_reason":null}' if end is None else json_text(end.fields())[1:]
        return f'{self._start}{delta},"logprobs":{logprobs},{finish}'

    # A whole answer

    def take(self, delta: Delta) -> None:
        self._scores += delta.scores
        self._prompt = self._prompt or delta.prompt
        for event in self._output.take(delta):
            match event:
                case Reasoning(text):
                    self._reasoning.append(text)
                case Content(text):
                    self._content.append(text)
                case CallBegan(_, call_id, name):
                    function = {"name": name, "arguments": ""}
                    self._calls.append({"id": call_id, "type": "function", "function": function})
                case CallArguments(index, text):
                    self._calls[index]["function"]["arguments"] += text

    def whole(self) -> dict[str, Any]:
        """The choice; no `tool_calls` key where there are none."""
        content = well_formed("".join(self._content))
        only_calls = bool(self._calls) and not content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if only_calls else content,
            "refusal": None,
        }
        reasoning = well_formed("".join(self._reasoning))
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = chat_logprobs(self._scores) if self._telling.logprobs else None
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            **self._end().fields(),
        }

    def beside(self) -> dict[str, Any]:
        top = self._telling.prompt_logprobs
        if top is None:
            return {}
        assert self._prompt is not None
        return {"prompt_logprobs": prompt_logprobs(self._prompt, top)}

    # Both

    def _end(self) -> End:
        end = self._output.end
        assert end is not None
        calls = self._output.calls and end.reason == "stop" and not self._telling.named_call
        return End("tool_calls") if calls else end


def _wire(event: ChatEvent) -> str | None:
    """An event as a delta's JSON; what a call begins with is said once, and its index always."""
    match event:
        case Reasoning(text):
            return f'{{"reasoning_content":{json_string(text)}}}'
        case Content(text):
            return f'{{"content":{json_string(text)}}}'
        case CallBegan(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return json_text({"tool_calls": [call]})
        case CallArguments(index, text):
            call = {"index": index, "function": {"arguments": well_formed(text)}}
            return json_text({"tool_calls": [call]})
        case _:
            return None
