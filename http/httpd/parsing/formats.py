"""Which markers and which parser read a model's text: by its chat template, or by name.

A chat template shows the model how to write calls and reasoning, so the markers in it are the ones
that will come.
"""

import enum
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.request import ReasoningMarkers
from httpd.parsing.call_text import HERMES, JSON, LLAMA3, MISTRAL, CallText
from httpd.parsing.calls import Calls
from httpd.parsing.output import OutputParser, PlainText

AUTO = "auto"  # on the command line: as the chat template says
_OPENING, _CLOSING = "<think>", "</think>"


class ToolsFormat(enum.StrEnum):
    """How a model writes calls."""

    HERMES = "hermes"  # Hermes, Qwen 2.5 and 3: <tool_call>{…}</tool_call>
    LLAMA3 = "llama3"  # Llama 3.1 to 3.3: {"name": …, "parameters": {…}}
    MISTRAL = "mistral"  # [TOOL_CALLS][{…}] or [TOOL_CALLS]name[ARGS]{…}
    JSON = "json"  # nothing but {"name": …, "arguments": {…}}, or an array of such
    NONE = "none"  # what looks like a call is content


class ReasoningFormat(enum.StrEnum):
    """How a model writes reasoning."""

    QWEN3 = "qwen3"  # <think>…</think>, or none; the prompt may have opened it
    DEEPSEEK_R1 = "deepseek-r1"  # always begins inside
    NONE = "none"


# Plain texts: click would offer an enum's members in capitals.
TOOLS_CHOICES = (AUTO, *(each.value for each in ToolsFormat))
REASONING_CHOICES = (AUTO, *(each.value for each in ReasoningFormat))

_CALL_FORMATS = {
    ToolsFormat.HERMES: HERMES,
    ToolsFormat.LLAMA3: LLAMA3,
    ToolsFormat.MISTRAL: MISTRAL,
    ToolsFormat.JSON: JSON,
}
# Templates with Hermes' marker around something that is not JSON: Qwen3-Coder and 3.5, GLM-4.5.
_NOT_HERMES = ("<function=", "<arg_key>")
# Mistral's templates refuse ids of another form when a client sends a call back.
_MISTRAL_ID_CHARS = 9
_MISTRAL_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Formats:
    """A model's formats."""

    tools: ToolsFormat = ToolsFormat.NONE
    reasoning: ReasoningFormat = ReasoningFormat.NONE


def infer_formats(chat_template: str) -> Formats:
    """The formats whose markers a chat template has."""
    return Formats(_infer_tools(chat_template), _infer_reasoning(chat_template))


def choose_formats(tools: str, reasoning: str, chat_template: str | None) -> Formats:
    """The formats by their names, `auto` for what the template says.

    Raises ValueError for a name that is not among the choices.
    """
    inferred = infer_formats(chat_template or "")
    return Formats(
        inferred.tools if tools == AUTO else ToolsFormat(tools),
        inferred.reasoning if reasoning == AUTO else ReasoningFormat(reasoning),
    )


def reasoning_markers(formats: Formats) -> ReasoningMarkers | None:
    """What the detokenizer splits reasoning off by; None where all text is content."""
    if formats.reasoning is ReasoningFormat.NONE:
        return None
    always = formats.reasoning is ReasoningFormat.DEEPSEEK_R1
    return ReasoningMarkers(_OPENING, _CLOSING, always=always)


def parser_for(
    formats: Formats,
    *,
    tool_names: Collection[str] = (),
    only_calls: bool = False,
) -> OutputParser:
    """The parser of a new response's content.

    tool_names  the tools that may be called; empty: calls are content
    only_calls  a grammar makes the answer a JSON call or an array of calls, whatever format the
                model has (tool_choice `required` or a name)
    """
    tools = ToolsFormat.JSON if only_calls else formats.tools
    if not tool_names or tools is ToolsFormat.NONE:
        return PlainText()
    return CallText(_CALL_FORMATS[tools], Calls(tool_names, _id_maker(formats.tools)))


def _infer_tools(template: str) -> ToolsFormat:
    if MISTRAL.opening in template:
        return ToolsFormat.MISTRAL
    if HERMES.opening in template:
        other = any(marker in template for marker in _NOT_HERMES)
        return ToolsFormat.NONE if other else ToolsFormat.HERMES
    llama = "<|start_header_id|>" in template and "parameters" in template
    if llama or LLAMA3.opening in template:
        return ToolsFormat.LLAMA3
    return ToolsFormat.NONE


def _infer_reasoning(template: str) -> ReasoningFormat:
    if _OPENING not in template and _CLOSING not in template:
        return ReasoningFormat.NONE
    return ReasoningFormat.DEEPSEEK_R1 if "<｜Assistant｜>" in template else ReasoningFormat.QWEN3


def _id_maker(tools: ToolsFormat) -> Callable[[], str]:
    return _mistral_id if tools is ToolsFormat.MISTRAL else _openai_id


def _openai_id() -> str:
    return "call_" + secrets.token_hex(12)


def _mistral_id() -> str:
    return "".join(secrets.choice(_MISTRAL_ID_ALPHABET) for _ in range(_MISTRAL_ID_CHARS))
