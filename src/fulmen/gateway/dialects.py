"""The families' dialects: facts about how each writes calls and reasoning.

Facts from the families' chat templates, as the `renderers` package parses them.
"""

import json

from fulmen.gateway.form import Dialect, Schema, Spell, json_value
from fulmen.schema.records import JSON


def tagged_arguments(rule: str, schema: Schema, spell: Spell) -> list[str]:
    """Arguments as pairs of keys and values between tags: text as it is, anything else as JSON.

    >>> schema = {"properties": {"n": {"type": "string"}}, "required": ["n"]}
    >>> for line in tagged_arguments("args", schema, repr): print(line)
    args: ('<arg_key>n</arg_key>\\n<arg_value>' args_0 '</arg_value>\\n')
    args_0: /[^<]*/
    """
    properties: Schema = schema.get("properties") or {}
    if not properties:
        pair = [
            spell("<arg_key>"),
            f"{rule}_text",
            spell("</arg_key>\n<arg_value>"),
            f"{rule}_text",
            spell("</arg_value>\n"),
        ]
        return [f"{rule}: ({' '.join(pair)})*", f"{rule}_text: {_TAG_TEXT}"]
    rules, pairs = [], []
    required = schema.get("required") or []
    for place, (name, value) in enumerate(properties.items()):
        part = f"{rule}_{place}"
        opening = spell(f"<arg_key>{name}</arg_key>\n<arg_value>")
        pair = f"({opening} {part} {spell('</arg_value>' + chr(10))})"
        pairs.append(pair if name in required else pair + "?")
        rules.append(f"{part}: {_tagged_value(value)}")
    return [f"{rule}: {' '.join(pairs)}", *rules]


_TAG_TEXT = r"/[^<]*/"
"""Text between tags. The format has no escape: a value cannot hold the beginning of a tag."""


def _tagged_value(schema: JSON) -> str:
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return json_value(schema if isinstance(schema, dict) else {})
    if choices := schema.get("enum"):
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _TAG_TEXT


QWEN = Dialect(
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
    reasoning=("<think>\n", "</think>\n\n"),
    call_opening=r"(?s:.*)<tool_call>(?s:.*)",
)
LLAMA3 = Dialect(
    call=('{"name": "', '", "parameters": ', "}"),
    mixed=False,
    call_opening=r"[ \n]*\{(?s:.*)",
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
    reasoning=("<think>", "</think>"),
    call_opening=r"(?s:.*)<tool_call>(?s:.*)",
    arguments=tagged_arguments,
)
PLAIN = Dialect(reasoning=("<think>", "</think>\n\n"))
"""A chat template of which nothing else is known."""
