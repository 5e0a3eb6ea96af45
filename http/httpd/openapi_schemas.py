"""The OpenAPI document's schemas that no pydantic model has: answers, and parts of bodies."""

from typing import Any, Final

from engine.sampling_limits import INT32_MAX
from httpd.fields import MAX_TOOLS

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
OBJECT: Final[Schema] = {"type": "object"}
NULL: Final[Schema] = {"type": "null"}


def ref(name: str) -> Schema:
    """A reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def any_of(*schemas: Schema) -> Schema:
    """One of these."""
    return {"anyOf": list(schemas)}


def one(*values: str) -> Schema:
    """One of these strings."""
    return {"type": "string", "enum": list(values)}


def array(items: Schema, **limits: int) -> Schema:
    """An array of such items."""
    return {"type": "array", "items": items, **limits}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these properties, and perhaps others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def or_null(schema: Schema) -> Schema:
    """Such a value, or null."""
    return any_of(schema, NULL)


_TEXT_PARTS: Final = array(ref("TextPart"), minItems=1)
_USAGE: Final = record(
    {name: COUNT for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
)
_RESPONSE_USAGE: Final = record(
    {
        "input_tokens": COUNT,
        "input_tokens_details": record({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": record({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)


def _choices(object_: str, **fields: Schema) -> Schema:
    """A completion's answer, whose choices have `fields`."""
    choice = record({"index": COUNT, **fields, "finish_reason": STRING})
    return record(
        {
            "id": STRING,
            "object": one(object_),
            "created": COUNT,
            "model": STRING,
            "choices": array(choice, minItems=1),
            "usage": _USAGE,
        }
    )


# Names of the answers' schemas -> schemas
ANSWERS: Final[dict[str, Schema]] = {
    "Error": record(
        {
            "error": record(
                {
                    "message": STRING,
                    "type": STRING,
                    "param": or_null(STRING),
                    "code": or_null(STRING),
                }
            )
        }
    ),
    "AnthropicError": record(
        {"type": one("error"), "error": record({"type": STRING, "message": STRING})}
    ),
    "ChatCompletion": _choices(
        "chat.completion",
        message=record({"role": one("assistant"), "content": or_null(STRING)}),
        logprobs=or_null(OBJECT),
    ),
    "Completion": _choices("text_completion", text=STRING, logprobs=or_null(OBJECT)),
    "Response": record(
        {
            "id": STRING,
            "object": one("response"),
            "created_at": COUNT,
            "status": one("completed", "incomplete"),
            "error": NULL,
            "incomplete_details": or_null(record({"reason": STRING})),
            "model": STRING,
            "output": array(record({"id": STRING, "type": STRING, "status": STRING})),
            "usage": _RESPONSE_USAGE,
        }
    ),
    "Message": record(
        {
            "id": STRING,
            "type": one("message"),
            "role": one("assistant"),
            "model": STRING,
            "content": array(record({"type": one("text", "thinking", "tool_use")})),
            "stop_reason": one("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": or_null(STRING),
            "usage": record(
                {
                    "input_tokens": COUNT,
                    "cache_creation_input_tokens": COUNT,
                    "cache_read_input_tokens": COUNT,
                    "output_tokens": COUNT,
                }
            ),
        }
    ),
    "TokenCount": record({"input_tokens": COUNT}),
    "Tokens": record(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": array(COUNT),
            "token_strs": or_null(array(STRING)),
        }
    ),
    "Text": record({"prompt": STRING}),
    "Model": record(
        {
            "id": STRING,
            "object": one("model"),
            "created": COUNT,
            "owned_by": STRING,
            "root": STRING,
            "max_model_len": COUNT,
        }
    ),
    "ModelList": record({"object": one("list"), "data": array(ref("Model"))}),
    "Health": record(
        {
            "state": one("loading", "ready", "draining", "failed"),
            "gil_enabled": BOOLEAN,
            "version": STRING,
            "occupancy": or_null(OBJECT),
        }
    ),
    "Ready": record({"state": one("ready")}),
    "Version": record({"version": STRING}),
    "ServerInfo": record({"served_model_name": STRING, "max_model_len": COUNT, "version": STRING}),
    "Flushed": record({"freed_pages": COUNT}),
    "CacheOutline": record(
        {
            **dict.fromkeys(("page_size", "cached_tokens", "locked_tokens", "total_nodes"), COUNT),
            "nodes": array(
                record(
                    {
                        "parent": {"type": "integer", "minimum": -1},  # its place in the list
                        **dict.fromkeys(("tokens", "locks", "uses", "hidden"), COUNT),
                    }
                )
            ),
        }
    ),
    "Aborted": record({"aborted": COUNT}),
    "StepLines": STRING,
    "StackDump": STRING,
    "Object": OBJECT,
}

# Names of other schemas of bodies -> schemas
PARTS: Final[dict[str, Schema]] = {
    "AbortRequest": any_of(
        record({"id": STRING}, {"all": {"enum": [False, None]}}),
        record({"all": {"const": True}}, {"id": NULL}),
    ),
    "TextPart": record({"type": one("text"), "text": STRING}),
    "Function": record(
        {"name": {"type": "string", "minLength": 1, "maxLength": 64}},
        {"description": or_null(STRING), "parameters": or_null(OBJECT)},
    ),
    "ChatTool": record({"type": one("function"), "function": ref("Function")}),
    "ChatMessage": any_of(
        record(
            {
                "role": one("system", "developer", "user", "function"),
                "content": any_of(STRING, _TEXT_PARTS),
            },
            {"name": or_null(STRING)},
        ),
        record(
            {"role": one("assistant")},
            {
                "content": any_of(STRING, array(ref("TextPart")), NULL),
                "reasoning_content": or_null(STRING),
                "name": or_null(STRING),
                "tool_calls": or_null(array(ref("ChatCall"), maxItems=128)),
            },
        ),
        record(
            {
                "role": one("tool"),
                "content": any_of(STRING, _TEXT_PARTS),
                "tool_call_id": STRING,
            },
            {"name": or_null(STRING)},
        ),
    ),
    "ChatCall": record(
        {"function": record({"name": STRING}, {"arguments": any_of(STRING, OBJECT, NULL)})},
        {"type": or_null(one("function")), "id": or_null(STRING)},
    ),
    "InputItem": any_of(
        record(
            {
                "role": one("user", "system", "developer"),
                "content": any_of(STRING, array(ref("InputPart"), minItems=1)),
            },
            {"type": any_of(one("message"), NULL)},
        ),
        record(
            {"role": one("assistant")},
            {
                "type": any_of(one("message"), NULL),
                "content": any_of(STRING, array(ref("InputPart")), NULL),
            },
        ),
        record(
            {"type": one("function_call"), "call_id": STRING, "name": STRING},
            {"arguments": any_of(STRING, OBJECT, NULL)},
        ),
        record(
            {
                "type": one("function_call_output"),
                "call_id": STRING,
                "output": any_of(STRING, array(ref("InputPart"), minItems=1)),
            }
        ),
        record(
            {"type": one("reasoning")},
            {"content": or_null(array(record({"text": STRING})))},
        ),
    ),
    "InputPart": record({"type": one("input_text", "output_text", "text"), "text": STRING}),
    "Turn": any_of(
        record(
            {
                "role": one("user", "system"),
                "content": any_of(
                    STRING, array(any_of(ref("TextPart"), ref("ToolResult")), minItems=1)
                ),
            }
        ),
        record(
            {
                "role": one("assistant"),
                "content": any_of(
                    STRING, array(any_of(ref("TextPart"), ref("ToolUse"), ref("Thought")))
                ),
            }
        ),
    ),
    "ToolResult": record(
        {"type": one("tool_result"), "tool_use_id": STRING},
        {"content": any_of(STRING, array(ref("TextPart")), NULL)},
    ),
    "ToolUse": record({"type": one("tool_use"), "id": STRING, "name": STRING}, {"input": OBJECT}),
    "Thought": record({"type": one("thinking"), "thinking": STRING}),
}

_TOKEN_IDS: Final = array({"type": "integer", "minimum": 0, "maximum": INT32_MAX}, minItems=1)
_PROMPT: Final = any_of({"type": "string", "minLength": 1}, _TOKEN_IDS)

# Model's class -> field -> the schema that code behind the model goes by
PLACES: Final[dict[str, dict[str, Schema]]] = {
    "ChatFields": {
        "messages": array(ref("ChatMessage"), minItems=1),
        "tools": array(ref("ChatTool"), maxItems=MAX_TOOLS),
    },
    "CompletionFields": {
        "prompt": any_of(_PROMPT, array(_PROMPT, minItems=1, maxItems=128)),
    },
    "ResponseFields": {
        "input": any_of(STRING, array(ref("InputItem"), minItems=1)),
        "tools": array({"allOf": [ref("Function"), record({"type": one("function")})]}),
    },
    "MessageFields": {
        "messages": array(ref("Turn"), minItems=1),
        "system": any_of(STRING, array(ref("TextPart"))),
        "tools": array(
            record(
                {"name": {"type": "string", "minLength": 1, "maxLength": 64}},
                {
                    "description": or_null(STRING),
                    "input_schema": or_null(OBJECT),
                    "type": any_of(one("custom"), NULL),
                },
            ),
            maxItems=MAX_TOOLS,
        ),
    },
    "TokenizeFields": {"messages": array(ref("ChatMessage"), minItems=1)},
    "DetokenizeFields": {"tokens": array(COUNT)},
}

# Model's class -> what a body must be besides: which of its fields go together
FORMS: Final[dict[str, Schema]] = {
    "TokenizeFields": any_of(
        record({"prompt": {"type": "string", "minLength": 1}}, {"messages": NULL}),
        record({"messages": {"type": "array"}}, {"prompt": NULL}),
    ),
}
