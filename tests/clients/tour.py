"""A tour of a server with LangChain, LiteLLM and openai-python, as their users call them.

    python -m venv CLIENTS && CLIENTS/bin/pip install langchain-openai litellm
    CLIENTS/bin/python tests/clients/tour.py http://127.0.0.1:8000

In an environment of their own: the two bring a hundred packages. Needs no model that understands
anything: what is checked is shapes, counts and errors, and that no client raises where none should.
"""

import json
import sys
from collections.abc import Callable

import httpx
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

URL = sys.argv[1].rstrip("/")
MODEL = httpx.get(f"{URL}/v1/models").json()["data"][0]["id"]
KEY = "unused"
PARIS = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def chat_model(**more: object) -> ChatOpenAI:
    settings = {"model": MODEL, "temperature": 0, "max_tokens": 60, "max_retries": 0, **more}
    return ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, **settings)  # type: ignore


def langchain_chat() -> None:
    answer = chat_model().invoke(PARIS)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def langchain_stream() -> None:
    chunks = list(chat_model(stream_usage=True).stream(PARIS))
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == chat_model().invoke(PARIS).content
    assert whole.usage_metadata["total_tokens"] > 0


def langchain_batch() -> None:
    answers = chat_model().batch([PARIS, "Say hello."] * 4)
    assert len({answers[i].content for i in range(0, 8, 2)}) == 1


def langchain_tools() -> None:
    bound = chat_model(max_tokens=300).bind_tools([weather], tool_choice="required", strict=True)
    answer = bound.invoke("What is the weather in Oslo?")
    assert answer.tool_calls or answer.invalid_tool_calls, answer
    for call in answer.tool_calls:
        assert call["name"] == "weather" and call["id"]
    if answer.tool_calls:
        call = answer.tool_calls[0]
        history = [HumanMessage("What is the weather?"), answer]
        told = weather.invoke(call["args"])
        history += [ToolMessage(told, tool_call_id=each["id"]) for each in answer.tool_calls]
        assert chat_model().invoke(history).content is not None
    chunks = list(bound.stream("What is the weather in Oslo?"))
    whole = sum(chunks[1:], chunks[0])
    assert [c["args"] for c in whole.tool_calls] == [c["args"] for c in answer.tool_calls]


def langchain_structured() -> None:
    for method in ("json_schema", "function_calling"):
        city = (
            chat_model(max_tokens=200).with_structured_output(City, method=method).invoke("Paris.")
        )
        assert isinstance(city, City), (method, city)


def langchain_logprobs() -> None:
    answer = chat_model(logprobs=True, top_logprobs=2).invoke(PARIS)
    entries = answer.response_metadata["logprobs"]["content"]
    is_ended = answer.response_metadata["finish_reason"] == "stop"  # by an id without a text
    assert len(entries) == answer.usage_metadata["output_tokens"] - is_ended
    assert "".join(entry["token"] for entry in entries) == answer.content
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def langchain_completion() -> None:
    model = OpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=5, n=2, best_of=1)
    assert model.generate(["Once", "Twice"]).llm_output["token_usage"]["completion_tokens"] > 0


def langchain_errors() -> None:
    for make, kind in (
        (lambda: chat_model(model="nobody").invoke("x"), openai.NotFoundError),
        (lambda: chat_model(temperature=9).invoke("x"), openai.BadRequestError),
        (lambda: chat_model(max_tokens=10**8).invoke("x"), openai.BadRequestError),
    ):
        try:
            make()
        except kind:
            continue
        raise AssertionError(kind)


def lite(**more: object) -> object:
    settings = {"max_tokens": 40, "temperature": 0, **more}
    messages = settings.pop("messages", [{"role": "user", "content": PARIS}])
    return litellm.completion(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, messages=messages, **settings
    )


def litellm_chat() -> None:
    answer = lite()
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0


def litellm_stream() -> None:
    chunks = list(lite(stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == lite().choices[0].message.content


def litellm_tools() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
                  "required": ["city"], "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    answer = lite(tools=tools, tool_choice="required", max_tokens=200, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and "city" in json.loads(call.function.arguments)


def litellm_schema() -> None:
    answer = lite(response_format=City, max_tokens=200)
    City.model_validate_json(answer.choices[0].message.content)


def litellm_errors() -> None:
    for more, kind in (
        ({"messages": [{"role": "user", "content": "x " * 30_000}]},
         litellm.ContextWindowExceededError),
        ({"temperature": -1}, litellm.BadRequestError),
    ):  # fmt: skip
        try:
            lite(num_retries=0, **more)
        except kind:
            continue
        raise AssertionError(kind)


def anthropic_like() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=URL, api_key=KEY, max_tokens=20,
        messages=[{"role": "user", "content": PARIS}],
    )  # fmt: skip
    assert answer.choices[0].message.content


def openai_responses() -> None:
    asked = {
        "model": MODEL, "input": PARIS, "temperature": 0, "max_output_tokens": 20,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    }  # fmt: skip
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    (part,) = client.responses.create(**asked).output[-1].content
    assert "".join(each.token for each in part.logprobs) == part.text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    with client.responses.stream(**asked) as stream:
        told = [each for event in stream if event.type == "response.output_text.delta"
                for each in event.logprobs]  # fmt: skip
        assert stream.get_final_response().output[-1].content[0].text == part.text
    assert [each.token for each in told] == [each.token for each in part.logprobs]


def openai_extras() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    asked = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    word = plain.split()[0]
    more = {"bad_words": [word], "prompt_logprobs": 1}
    choice = client.completions.create(**asked, extra_body=more).choices[0]
    assert word not in choice.text.split() and choice.prompt_logprobs[0] is None


STOPS: list[Callable[[], None]] = [
    langchain_chat, langchain_stream, langchain_batch, langchain_tools, langchain_structured,
    langchain_logprobs, langchain_completion, langchain_errors, litellm_chat, litellm_stream,
    litellm_tools, litellm_schema, litellm_errors, anthropic_like, openai_responses, openai_extras,
]  # fmt: skip


def main() -> None:
    failed = 0
    for stop in STOPS:
        try:
            stop()
            print(f"ok      {stop.__name__}")
        except Exception as error:
            failed += 1
            print(f"FAILED  {stop.__name__}: {type(error).__name__}: {str(error)[:300]}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
