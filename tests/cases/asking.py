"""How the cases ask: bodies, streams as a client adds them up, and several requests at once."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from openai.lib.streaming._deltas import accumulate_delta

from tests.server_process import SOON_S, ServerProcess

CONTEXT = 1024  # tokens, prompt and output
MODEL = "tiny"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Json = dict[str, Any]


def forced(text: str) -> Json:
    """Makes the model say this text, byte by byte."""
    return {"structured_outputs": {"choice": [text]}}


def schema(value: Any) -> Json:
    """Asks for a value of this JSON schema."""
    asked = {"name": "answer", "strict": True, "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": asked}}


def chat_body(content: str = "hello", **more: Any) -> Json:
    """Greedy, eight tokens, unless `more` says otherwise."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


def completion_body(prompt: Any = "hello", **more: Any) -> Json:
    """Greedy, eight tokens, unless `more` says otherwise."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}


def chat(server: ServerProcess, content: str = "hello", **more: Any) -> Json:
    """A whole answer."""
    return answer(server.post(CHAT, chat_body(content, **more)))


def complete(server: ServerProcess, prompt: Any = "hello", **more: Any) -> Json:
    """A whole answer."""
    return answer(server.post(COMPLETIONS, completion_body(prompt, **more)))


def complete_text(server: ServerProcess, prompt: Any = "hello", **more: Any) -> str:
    """The text of the only choice."""
    (choice,) = complete(server, prompt, **more)["choices"]
    text = choice["text"]
    assert isinstance(text, str)
    return text


def answer(response: httpx.Response) -> Json:
    assert response.status_code == 200, response.text
    return json_of(response)


def refusal(response: httpx.Response, param: str | None = None, status: int = 400) -> Json:
    """What an SDK reads from an error; the body has its four keys, and it is no stream."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    told = json_of(response)
    assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}
    error: Json = told["error"]
    assert error["message"] and error["type"]
    assert param is None or error["param"] == param, error
    return error


def json_of(response: httpx.Response) -> Json:
    """The body, which has no NaN and no Infinity in it: strict parsers fail there."""

    def fail(literal: str) -> float:
        raise AssertionError(f"{literal} in {response.text}")

    value: Json = json.loads(response.text, parse_constant=fail)
    return value


def chat_chunks(server: ServerProcess, content: str = "hello", **more: Any) -> list[Json]:
    """The chunks of a stream."""
    return chunks_of(server.post(CHAT, chat_body(content, stream=True, **more)))


def completion_chunks(server: ServerProcess, prompt: Any = "hello", **more: Any) -> list[Json]:
    """The chunks of a stream."""
    return chunks_of(server.post(COMPLETIONS, completion_body(prompt, stream=True, **more)))


def chunks_of(response: httpx.Response) -> list[Json]:
    assert response.status_code == 200, response.text
    *frames, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def choices_of(chunks: Sequence[Json], index: int = 0) -> list[Json]:
    """What the chunks say of one choice."""
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def message_of(chunks: Sequence[Json]) -> tuple[Json, str]:
    """What openai-python makes of a chat's stream, and its one finish reason."""
    choices = choices_of(chunks)
    message: dict[object, object] = {}
    for choice in choices:
        message = accumulate_delta(message, choice["delta"])
    *before, finish = [choice["finish_reason"] for choice in choices]
    assert not any(before)
    return message, finish  # type: ignore[return-value]


def text_of(chunks: Sequence[Json]) -> tuple[str, str]:
    """The text of a completion's stream, and its one finish reason."""
    choices = choices_of(chunks)
    *before, finish = [choice["finish_reason"] for choice in choices]
    assert not any(before)
    return "".join(choice["text"] for choice in choices), finish


def at_once(asked: Sequence[Callable[[], Any]]) -> list[Any]:
    """All at the same time; their results in order."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return [done.result(SOON_S) for done in [pool.submit(each) for each in asked]]
