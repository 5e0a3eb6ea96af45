"""A checkpoint's chat template: messages in, the prompt's text out.

The template is a program that came with the checkpoint, and the messages are a client's: it runs in
jinja's sandbox, its output is bounded, and whatever it raises is the fault of that one request.
Clients cannot bring templates of their own. Does not know tokens, and does not import transformers,
whose renderer has no bound and costs seconds of start-up; what templates may use is the same.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, PromptError
from engine.request import TEXT_PARTS, ChatPrompt

_SHOWN_CHARS: Final = 300  # of what a template says


class ChatTemplate:
    """A compiled template. Safe from any thread: rendering writes nothing that is shared."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], max_chars: int) -> None:
        """Raises ModelError where `source` is not a template.

        special_tokens  what the template calls bos_token, eos_token and so on
        max_chars       longest text that a prompt may become
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text, mostly up to where the answer begins. Raises PromptError."""
        if not prompt.messages:
            raise PromptError("there are no messages", "messages")
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **prompt.template_kwargs,
            "messages": [_plain(m, f"messages[{i}]") for i, m in enumerate(prompt.messages)],
            "add_generation_prompt": prompt.opens_answer and not prompt.continue_final,
        }
        parts, chars = [], 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                chars += len(part)
                if chars > self._max_chars:
                    break
        except jinja2.TemplateError as error:
            why = str(error)[:_SHOWN_CHARS]  # it may repeat the messages
            raise PromptError(
                f"the chat template refuses the messages: {why}", "messages"
            ) from error
        except Exception as error:  # a template is a program: it may raise anything
            kind = type(error).__name__
            message = f"the chat template cannot render the messages ({kind})"
            raise PromptError(message, "messages") from error
        if chars > self._max_chars:
            raise PromptError(
                f"the messages make a prompt of more than {self._max_chars} characters", "messages"
            )
        text = "".join(parts)
        return _up_to_final(text, variables["messages"][-1]) if prompt.continue_final else text


def _up_to_final(text: str, message: Mapping[str, Any]) -> str:
    """The text up to the end of the last message's content. Raises PromptError."""
    content = message["content"]
    bare = content.strip()
    # Backwards, since the time of `rfind` grows with the product of both lengths: minutes for a
    # megabyte that nearly matches everywhere. `find` is linear.
    from_end = text[::-1].find(bare[::-1])
    if from_end < 0:
        raise PromptError(
            "the chat template does not show the last message's text as it is, so that it cannot "
            "be continued",
            "continue_final_message",
        )
    at = len(text) - from_end - len(bare)
    exact = content.lstrip()
    return text[: at + len(exact if text.startswith(exact, at) else bare)]


def read_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source of a checkpoint's template, or None. A file of its own goes first."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is not None and not isinstance(source, str):
        raise ModelError(f"{folder}: chat_template is a {type(source).__name__}, not text")
    return source


def _plain(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The message in the one form that every template knows: content is a string."""
    plain = dict(message)
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif isinstance(content, list):
        plain["content"] = "".join(
            _part(part, f"{path}.content[{i}]") for i, part in enumerate(content)
        )
    elif not isinstance(content, str):
        raise PromptError("content is neither text nor a list of text parts", f"{path}.content")
    if plain.get("role") == "developer":  # the newer name of a role that all templates call system
        plain["role"] = "system"
    return plain


def _part(part: Any, path: str) -> str:
    # Not `part.get`, which takes 100 µs for a dict of another thread: CPython 3.13 locks it twice,
    # and waits for itself.
    try:
        text = part[part["type"]] if part["type"] in TEXT_PARTS else None
    except (KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise PromptError("only text parts are supported", path)
    return text


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text, for training; here it is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training; jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
