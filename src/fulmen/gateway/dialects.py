"""The families' dialects: facts about how each writes calls and reasoning.

Facts from the families' chat templates, as the `renderers` package parses them.
"""

import json

from fulmen.gateway.form import Dialect, Schema, Spell, json_value
from fulmen.schema.errors import GrammarError
from fulmen.schema.records import JSON

_ENFORCED = {"type", "enum", "const", "minLength", "maxLength", "description", "title", "default"}
"""What can be said of a text between tags."""
_TAG_CHARACTER = "[^<]"
"""The format has no escape: a text cannot hold the beginning of a tag."""


def tagged_arguments(rule: str, schema: Schema, spell: Spell) -> list[str]:
    """Arguments as pairs of keys and values between tags: text as it is, anything else as JSON.

    Raises:
        GrammarError: the schema is more than a list of properties, or asks more of a text than can
            be kept to.

    >>> schema = {"properties": {"n": {"type": "string"}}, "required": ["n"]}
    >>> for line in tagged_arguments("args", schema, repr): print(line)
    args: ('<arg_key>n</arg_key>\\n<arg_value>' args_0 '</arg_value>\\n')
    args_0: /[^<]*/
    """
    others = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & schema.keys()
    if others:
        raise GrammarError(f"arguments with {min(others)} cannot be held to their schema here")
    properties: Schema = schema.get("properties") or {}
    if not properties:
        if schema.get("additionalProperties") is False:
            return [f'{rule}: ""']
        key, value = f"{rule}_key", f"{rule}_value"
        marks = map(spell, ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"))
        before, between, behind = marks
        pair = f"{before} {key} {between} {value} {behind}"
        text = f"/{_TAG_CHARACTER}*/"
        return [f"{rule}: ({pair})*", f"{key}: {text}", f"{value}: {text}"]
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required") or []
    rules, pairs = [], []
    for place, (name, value) in enumerate(properties.items()):
        part = f"{rule}_{place}"
        opening = spell(f"<arg_key>{name}</arg_key>\n<arg_value>")
        pair = f"({opening} {part} {spell('</arg_value>' + chr(10))})"
        pairs.append(pair if name in required else pair + "?")
        rules.append(f"{part}: {_tagged_value(name, value, shared)}")
    return [f"{rule}: {' '.join(pairs)}", *rules]


def _tagged_value(name: str, schema: JSON, shared: Schema) -> str:
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return json_value({**(schema if isinstance(schema, dict) else {}), **shared})
    other = schema.keys() - _ENFORCED
    if other:
        raise GrammarError(f"the argument {name!r} cannot be held to its {min(other)} here")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        return " | ".join(json.dumps(str(choice), ensure_ascii=False) for choice in choices)
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
    return f"/{_TAG_CHARACTER}{count}/"


QWEN = Dialect(
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
    reasoning=("<think>\n", "</think>\n\n"),
    call_opening=r"(?s:.*)<tool_call>(?s:.*)",
)
LLAMA3 = Dialect(
    call=('{"name": "', '", "parameters": ', "}"),
    mixed=False,
    bare=True,
    call_opening=r"\s*\{(?s:.*)",
)
HARMONY = Dialect(
    call=(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "<|call|>",
    ),
    text="<|channel|>final<|message|>",
    reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    mixed=False,
)
DEEPSEEK = Dialect(
    call=(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
    between="\n",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    reasoning=("<think>", "</think>"),
)
GLM = Dialect(
    call=("<tool_call>", "\n", "</tool_call>"),
    between="\n",
    around=("\n", ""),
    text="\n",
    reasoning=("\n<think>", "</think>"),
    thinks=True,
    call_opening=r"(?s:.*)<tool_call>(?s:.*)",
    arguments=tagged_arguments,
)
PLAIN = Dialect(reasoning=("<think>", "</think>\n\n"))
"""A chat template of which nothing else is known."""
