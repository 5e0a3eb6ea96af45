"""Stop strings and stop tokens: vllm#3574, #3672 (with #3572, #2577, #3026), #13087, #8468, #14170,
#14399; sglang#11446, #11462; ai-dynamo/dynamo#12562.

Every text is decoded byte by byte, so that no stop string is a single token. Also
tests/engine/test_stopping.py and test_detokenizer.py.
"""

from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.request import Finish
from tests.cases.asking import (
    CHAT,
    chat,
    chat_body,
    chat_chunks,
    choices_of,
    complete,
    complete_text,
    completion_chunks,
    forced,
    message_of,
    refusal,
    text_of,
)
from tests.checkpoints import EOS
from tests.engine.test_detokenizer import Run
from tests.server_process import ServerProcess

MARKER, MARKER_ID = "<|im_start|>", 257


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["nothing", "DEFGHIJ"]])
def test_nothing_of_a_stop_string_is_sent(server: ServerProcess, stop: Any) -> None:
    """vllm#3574, sglang#11446, #11462: neither its beginning nor its end."""
    asked: dict[str, Any] = {"max_tokens": 50, "stop": stop, **forced("ABC DEFGHI DEFGHIJKL")}
    prompt = "Here is the English alphabet: ABC"
    chunks = completion_chunks(server, prompt, **asked)
    assert text_of(chunks) == ("ABC DEFGHI ", "stop")
    assert choices_of(chunks)[-1]["stop_reason"] == "DEFGHIJ"
    told = message_of(chat_chunks(server, prompt, **asked))
    assert told == ({"role": "assistant", "content": "ABC DEFGHI "}, "stop")
    assert chat(server, prompt, **asked)["choices"][0]["message"]["content"] == "ABC DEFGHI "


@pytest.mark.parametrize("family", ["byte_level", "tiktoken", "byte_fallback", "gemma"])
@pytest.mark.parametrize("stop", ["lo wo", "o w", "llo", "world", "d"])
def test_stop_strings_are_matched_on_text(family: str, stop: str) -> None:
    """vllm#3672, #3572, #2577: within a token, across tokens; cut where the match begins."""
    run = Run("hello world", family=family, stop=(stop,)).push_all(Finish.LENGTH)
    text = run.tokenizer.decode(run.ids)
    assert run.text == text[: text.index(stop)]
    assert (run.last.finish, run.last.stop_match) == (Finish.STOP, stop)


def test_a_stop_string_across_tokens(server: ServerProcess) -> None:
    """vllm#3672, #3572: and one stop string does not hide another that ends sooner."""
    asked = {"max_tokens": 50, **forced("hello world")}
    for stop, text in [(["lo wo"], "hel"), (["lo world", "o w"], "hell"), (["ll", "el"], "h")]:
        choice = complete(server, stop=stop, **asked)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_token_takes_nothing_else_along(
    server: ServerProcess, backend: Tokenizer, skip: bool
) -> None:
    """vllm#3672, #3026: also where it is a special token, whose text is skipped or not."""
    more: dict[str, Any] = {"max_tokens": 50, "skip_special_tokens": skip}
    special: dict[str, Any] = {"stop_token_ids": [EOS], **more, **forced("hello")}
    text = complete_text(server, max_tokens=8)
    other = next(char for char in text if char != text[0])
    plain: dict[str, Any] = {"stop_token_ids": backend.encode(other).ids, **more}
    for asked, expected in [(special, "hello"), (plain, text[: text.index(other)])]:
        choice = complete(server, **asked)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        assert choice["stop_reason"] == asked["stop_token_ids"][0]
        assert text_of(completion_chunks(server, **asked)) == (expected, "stop")


def test_no_empty_chunks_while_text_is_held(server: ServerProcess) -> None:
    """vllm#13087: beside the first chunk, which tells the role, and the last, each has content."""
    asked: dict[str, Any] = {"stop": ["zzz"], "max_tokens": 50, **forced("zzabzzczz")}
    first, *middle, last = (choice["delta"] for choice in choices_of(chat_chunks(server, **asked)))
    assert (first, last) == ({"role": "assistant", "content": ""}, {})
    assert all(set(delta) == {"content"} and delta["content"] for delta in middle)
    assert "".join(delta["content"] for delta in middle) == "zzabzzczz"
    *texts, end = choices_of(completion_chunks(server, **asked))
    assert all(choice["text"] for choice in texts) and end["text"] == ""


@pytest.mark.parametrize("text", ["abcXY", "aXbXX", "abcde"])
def test_held_text_is_told_at_any_other_end(server: ServerProcess, text: str) -> None:
    """vllm#8468: the limit comes while the text ends like the beginning of a stop string."""
    asked: dict[str, Any] = {"stop": ["XYZ"], "max_tokens": 5, **forced(text + "more")}
    assert text_of(completion_chunks(server, **asked)) == (text, "length")
    assert message_of(chat_chunks(server, **asked))[0]["content"] == text
    ended = {**asked, "max_tokens": 6, **forced(text)}
    assert text_of(completion_chunks(server, **ended)) == (text, "stop")


def test_stop_strings_are_looked_for_in_content_alone(server: ServerProcess) -> None:
    """vllm#14170, #14399: reasoning may mention them; its markers are nobody's text."""
    thought = "<think>\nfirst ✿RESULT✿ then\n</think>\n\nthe answer ✿RESULT✿ more"
    asked: dict[str, Any] = {"stop": ["✿RESULT✿"], "max_tokens": 150, **forced(thought)}
    message, finish = message_of(chat_chunks(server, **asked))
    assert message == {
        "role": "assistant", "content": "the answer ", "reasoning_content": "first ✿RESULT✿ then"
    }  # fmt: skip
    assert finish == "stop"
    whole = chat(server, **asked)["choices"][0]
    assert whole["stop_reason"] == "✿RESULT✿"
    told = whole["message"]
    assert (told["content"], told["reasoning_content"]) == ("the answer ", "first ✿RESULT✿ then")
    assert chat(server, **asked)["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("stop", "content", "finish"),
    [("\n\n", "one two", "stop"), ("\n", "one two", "stop"), (" ", "one", "stop"),
     ("think>", "one two\n\nthree", None), (">", "one two\n\nthree", None),
     ("</think>\n\none", "one two\n\nthree", None)],
)  # fmt: skip
def test_no_stop_string_is_found_in_a_marker_or_beside_it(
    server: ServerProcess, stop: str, content: str, finish: str | None
) -> None:
    """vllm#14170: what stands between reasoning and the answer is of neither."""
    asked: dict[str, Any] = {"stop": [stop], "max_tokens": 150}
    asked |= forced("<think>\na b\n</think>\n\none two\n\nthree")
    whole = chat(server, **asked)["choices"][0]
    told = {"role": "assistant", "content": content, "reasoning_content": "a b"}
    assert whole["message"] == {**told, "refusal": None}
    assert whole.get("stop_reason") == (stop if finish else None)
    assert message_of(chat_chunks(server, **asked)) == (told, "stop")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [None, "include_stop_str_in_output", "no_stop_trim"])
def test_a_marker_as_stop(server: ServerProcess, include: str | None, skip: bool) -> None:
    """dynamo#12562: no part of the text, unless it is asked for, and special tokens with it."""
    asked: dict[str, Any] = {"allowed_token_ids": [MARKER_ID], "skip_special_tokens": skip}
    if include is not None:
        asked[include] = True
    expected = MARKER if include and not skip else ""
    by_id = text_of(completion_chunks(server, stop_token_ids=[MARKER_ID], **asked))
    assert by_id == (expected, "stop")
    by_text = text_of(completion_chunks(server, stop=[MARKER], **asked))
    assert by_text == (expected, "length" if skip else "stop")


def test_an_included_stop_string_ends_the_text(server: ServerProcess) -> None:
    """dynamo#12562: the whole of it, and nothing behind it."""
    asked: dict[str, Any] = {"stop": ["lo wo"], "max_tokens": 50, **forced("hello world")}
    told = text_of(completion_chunks(server, include_stop_str_in_output=True, **asked))
    assert told == ("hello wo", "stop")


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], ["x"] * 17, {"a": 1}])
def test_stop_strings_that_mean_nothing_are_refused(server: ServerProcess, stop: Any) -> None:
    """An empty one would end every answer at once."""
    param = refusal(server.post(CHAT, chat_body(stop=stop)))["param"]
    assert str(param).startswith("stop")
