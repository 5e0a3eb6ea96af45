"""Which format a chat template stands for, and the names on the command line."""

import pytest

from engine.request import ReasoningMarkers
from httpd.parsing.formats import (
    REASONING_CHOICES,
    TOOLS_CHOICES,
    Formats,
    ReasoningFormat,
    ToolsFormat,
    choose_formats,
    infer_formats,
    reasoning_markers,
)

# The lines of each family's template that show how calls and reasoning are written.
QWEN25 = r"""
{%- if tools %}
    {{- "return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
    {{- "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
QWEN3 = (
    QWEN25
    + r"""
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}
{%- endif %}
"""
)
QWEN3_CODER = r"""
{{- '<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n' }}
"""
GLM = r"""{{- '<tool_call>' + name + '\n<arg_key>' + k + '</arg_key>' }} <think></think>"""
LLAMA31 = r"""
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- "<|python_tag|>" + tool_call.name + ".call(" }}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
"""
LLAMA32 = LLAMA31.replace("<|python_tag|>", "")
LLAMA30 = r"""{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"""
MISTRAL_V3 = r"""{{- "[TOOL_CALLS] [" }}{{- tool_call.function|tojson }}"""
MISTRAL_V13 = r"""{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"""
R1 = r"""
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{% if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}
"""
SMOLLM2 = r"""{{'<|im_start|>' + message['role'] + '\n' + message['content']}}"""


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN25, "hermes", "none"),
        (QWEN3, "hermes", "qwen3"),
        (QWEN3_CODER, "none", "none"),  # its calls are not JSON
        (GLM, "none", "qwen3"),
        (LLAMA31, "llama3", "none"),
        (LLAMA32, "llama3", "none"),
        (LLAMA30, "none", "none"),
        (MISTRAL_V3, "mistral", "none"),
        (MISTRAL_V13, "mistral", "none"),
        (R1, "none", "deepseek-r1"),
        (SMOLLM2, "none", "none"),
        ("", "none", "none"),
    ],
)
def test_a_template_shows_its_formats(template: str, tools: str, reasoning: str) -> None:
    inferred = infer_formats(template)
    assert (inferred.tools, inferred.reasoning) == (tools, reasoning)


def test_names() -> None:
    assert TOOLS_CHOICES == ("auto", "hermes", "llama3", "mistral", "json", "none")
    assert REASONING_CHOICES == ("auto", "qwen3", "deepseek-r1", "none")
    given = choose_formats("llama3", "none", QWEN3)
    assert given == Formats(ToolsFormat.LLAMA3, ReasoningFormat.NONE)
    assert choose_formats("auto", "auto", QWEN3) == infer_formats(QWEN3)
    assert choose_formats("auto", "auto", None) == Formats()
    with pytest.raises(ValueError, match="hermes2"):
        choose_formats("hermes2", "auto", None)


def test_the_markers_of_reasoning() -> None:
    def markers(format: str) -> ReasoningMarkers | None:
        return reasoning_markers(Formats(reasoning=ReasoningFormat(format)))

    assert markers("none") is None
    assert markers("qwen3") == ReasoningMarkers("<think>", "</think>")
    assert markers("deepseek-r1") == ReasoningMarkers("<think>", "</think>", always=True)
