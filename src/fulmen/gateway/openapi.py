"""What the gateway understands, as an OpenAPI 3.1 description.

For people who look up what is served, and for tools that try everything that is described. Fields
that are not described are accepted and recorded, as the protocols' own servers do it.
"""

from collections.abc import Mapping

from fulmen.schema.records import JSON

Schema = dict[str, JSON]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_OBJECT: Schema = {"type": "object"}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _integer(low: int, high: int | None = None) -> Schema:
    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return {"type": ["integer", "null"], **bounds}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def _constant(value: str) -> Schema:
    return {"const": value}


_PARTS = _list(_object({"type": _constant("text"), "text": _TEXT}))
_CONTENT = _either(_TEXT, _PARTS)
_FUNCTION = _object({"name": _TEXT}, {"description": _TEXT, "parameters": _OBJECT, "strict": _FLAG})
_CHAT_MESSAGE = _either(
    _object(
        {"role": {"enum": ["system", "developer", "user"]}, "content": _CONTENT}, {"name": _TEXT}
    ),
    _object(
        {"role": _constant("assistant")},
        {
            "content": _either(_CONTENT, {"type": "null"}),
            "tool_calls": _list(
                _object(
                    {
                        "id": _TEXT,
                        "type": _constant("function"),
                        "function": _object({"name": _TEXT, "arguments": _TEXT}),
                    }
                )
            ),
        },
    ),
    _object({"role": _constant("tool"), "tool_call_id": _TEXT, "content": _CONTENT}),
)
_STOP = _either({"type": "string", "minLength": 1}, _list({"type": "string", "minLength": 1}))
_SAMPLING: Mapping[str, Schema] = {
    "temperature": _number(0, 2),
    "top_p": _number(1e-6, 1),
    "stream": _FLAG,
}

_CHAT = _object(
    {"model": _TEXT, "messages": {**_list(_CHAT_MESSAGE), "minItems": 1}},
    {
        **_SAMPLING,
        "tools": _list(_object({"type": _constant("function"), "function": _FUNCTION})),
        "tool_choice": _either({"enum": ["auto", "none", "required"]}, _OBJECT),
        "parallel_tool_calls": _FLAG,
        "response_format": _object(
            {"type": {"enum": ["text", "json_object", "json_schema"]}}, {"json_schema": _OBJECT}
        ),
        "n": _integer(1, 128),
        "stop": _STOP,
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        "seed": {"type": ["integer", "null"]},
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, 20),
        "stream_options": _OBJECT,
        "chat_template_kwargs": _OBJECT,
    },
)
_COMPLETIONS = _object(
    {
        "model": _TEXT,
        "prompt": _either(
            {"type": "string", "minLength": 1},
            {**_list({"type": "string", "minLength": 1}), "minItems": 1},
            {**_list({"type": "integer", "minimum": 0}), "minItems": 1},
        ),
    },
    {
        **_SAMPLING,
        "n": _integer(1, 128),
        "stop": _STOP,
        "max_tokens": _integer(1),
        "seed": {"type": ["integer", "null"]},
        "logprobs": _integer(0, 20),
    },
)
_BLOCK = _either(
    _object({"type": _constant("text"), "text": _TEXT}),
    _object(
        {"type": _constant("tool_use"), "id": _TEXT, "name": _TEXT, "input": _OBJECT},
    ),
    _object(
        {"type": _constant("tool_result"), "tool_use_id": _TEXT},
        {"content": _CONTENT, "is_error": _FLAG},
    ),
)
_MESSAGES_PROMPT: Mapping[str, Schema] = {
    "model": _TEXT,
    "messages": {
        **_list(
            _object(
                {"role": {"enum": ["user", "assistant"]}, "content": _either(_TEXT, _list(_BLOCK))}
            )
        ),
        "minItems": 1,
    },
}
_MESSAGES_OPTIONS: Mapping[str, Schema] = {
    "system": _CONTENT,
    "tools": _list(_object({"name": _TEXT, "input_schema": _OBJECT}, {"description": _TEXT})),
    "tool_choice": _object({"type": {"enum": ["auto", "any", "tool", "none"]}}, {"name": _TEXT}),
}
_MESSAGES = _object(
    {**_MESSAGES_PROMPT, "max_tokens": {"type": "integer", "minimum": 1}},
    {
        **_SAMPLING,
        **_MESSAGES_OPTIONS,
        "temperature": _number(0, 1),
        "stop_sequences": _list({"type": "string", "minLength": 1}),
        "output_config": _OBJECT,
    },
)
_ITEM = _either(
    _object({"role": {"enum": ["user", "system", "developer", "assistant"]}, "content": _TEXT}),
    _object(
        {
            "type": _constant("function_call"),
            "call_id": _TEXT,
            "name": _TEXT,
            "arguments": _TEXT,
        }
    ),
    _object({"type": _constant("function_call_output"), "call_id": _TEXT, "output": _TEXT}),
)
_RESPONSES = _object(
    {"model": _TEXT, "input": _either(_TEXT, {**_list(_ITEM), "minItems": 1})},
    {
        **_SAMPLING,
        "instructions": {"type": ["string", "null"]},
        "previous_response_id": {"type": ["string", "null"]},
        "store": _FLAG,
        "tools": _list(
            _object({"type": _constant("function"), "name": _TEXT}, {"parameters": _OBJECT})
        ),
        "tool_choice": _either({"enum": ["auto", "none", "required"]}, _OBJECT),
        "parallel_tool_calls": _FLAG,
        "text": _object({}, {"format": _OBJECT}),
        "max_output_tokens": _integer(1),
        "top_logprobs": _integer(0, 20),
        "include": _list(_TEXT),
    },
)

_OPENAI_ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }
        )
    }
)
_ANTHROPIC_ERROR = _object(
    {"type": _constant("error"), "error": _object({"type": _TEXT, "message": _TEXT})}
)


def _operation(summary: str, answer: Schema, error: Schema, body: Schema | None = None) -> Schema:
    whole: Schema = {"application/json": {"schema": answer}}
    if body is not None and "stream" in body["properties"]:
        whole["text/event-stream"] = {"schema": {}}
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": whole},
            "default": {
                "description": "why it is not served, in the protocol's own form",
                "content": {"application/json": {"schema": error}},
            },
        },
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation


def _answer(kind: str, field: str = "object", **required: Schema) -> Schema:
    return _object({"id": _TEXT, field: _constant(kind), **required})


_MODEL = _answer("model")
_RESPONSE = _answer("response", status=_TEXT, output=_list(_OBJECT))
_NAME: Schema = {"name": "name", "in": "path", "required": True, "schema": _TEXT}


def _openai_paths() -> Schema:
    """OpenAI's protocols."""
    return {
        "/chat/completions": {
            "post": _operation(
                "OpenAI's chat completions",
                _answer("chat.completion", choices=_list(_OBJECT), usage=_OBJECT),
                _OPENAI_ERROR,
                _CHAT,
            )
        },
        "/completions": {
            "post": _operation(
                "OpenAI's completions, of text or tokens",
                _answer("text_completion", choices=_list(_OBJECT), usage=_OBJECT),
                _OPENAI_ERROR,
                _COMPLETIONS,
            )
        },
        "/responses": {
            "post": _operation("OpenAI's responses", _RESPONSE, _OPENAI_ERROR, _RESPONSES)
        },
        "/responses/{name}": {
            "parameters": [_NAME],
            "get": _operation("A response that was stored", _RESPONSE, _OPENAI_ERROR),
            "delete": _operation(
                "Forget a response", _answer("response", deleted=_FLAG), _OPENAI_ERROR
            ),
        },
    }


def _anthropic_paths() -> Schema:
    """Anthropic's protocol."""
    return {
        "/messages": {
            "post": _operation(
                "Anthropic's messages",
                _answer("message", "type", content=_list(_OBJECT), usage=_OBJECT),
                _ANTHROPIC_ERROR,
                _MESSAGES,
            )
        },
        "/messages/count_tokens": {
            "post": _operation(
                "How many tokens a prompt has",
                _object({"input_tokens": _integer(0)}),
                _ANTHROPIC_ERROR,
                _object(_MESSAGES_PROMPT, _MESSAGES_OPTIONS),
            )
        },
    }


def _model_paths() -> Schema:
    """What there is to ask for."""
    return {
        "/models": {
            "get": _operation("The models", _object({"data": _list(_MODEL)}), _OPENAI_ERROR)
        },
        "/models/{name}": {
            "parameters": [_NAME],
            "get": _operation("One model", _MODEL, _OPENAI_ERROR),
        },
    }


def description() -> Schema:
    """The OpenAPI document; paths are behind `/v1`."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fulmen gateway", "version": "1"},
        "servers": [{"url": "/v1"}],
        "security": [{"bearer": []}, {"x-api-key": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "paths": {**_openai_paths(), **_anthropic_paths(), **_model_paths()},
    }
