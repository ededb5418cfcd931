"""A small tokenizer for every model family, and answers spelled as its models spell them.

The tokenizers are byte-level and know a few words; the ids and flags of the structural tokens are
those of the originals. The spellings are written here once more, not taken from what renders them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fulmen.gateway.render import Answer, ChatRenderer, make_renderer

_WORDS = (
    'user assistant system tool function name arguments parameters result and the "a": 1} hello'
)
_CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One family, and what its format can say."""

    name: str
    model_type: str
    special: Mapping[str, int]
    """Structural tokens that the tokenizer calls special; the first ends a turn."""
    plain: Mapping[str, int]
    """Structural tokens that it does not."""
    spell: Callable[[Answer], str]
    """An answer as the family's models write it, its end included."""
    asks: str
    """How a prompt ends that the model must answer."""
    template: str | None = None
    calls: int = 9
    """The most calls in one answer."""
    thinks: bool = False
    says_and_calls: bool = True
    """Whether an answer may have both text and calls."""
    forgets: bool = False
    """Whether a new question always drops what earlier answers were sampled as."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.special, *self.plain)

    @property
    def tokenizer(self) -> Any:
        return tokenizer(self.name)

    @property
    def renderer(self) -> ChatRenderer:
        return renderer(self.name)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


@cache
def tokenizer(name: str) -> Any:
    """The tokenizer of a family."""
    family = FAMILIES[name]
    return build({**family.special, **family.plain}, set(family.special), family.template)


@cache
def renderer(name: str) -> ChatRenderer:
    """The renderer of a family; gpt-oss needs `harmony` in the place of what it downloads."""
    return make_renderer(tokenizer(name), FAMILIES[name].model_type)


def build(structure: Mapping[str, int], special: set[str], template: str | None) -> Any:
    """A byte-level tokenizer whose structural tokens have the given ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = bytes_of
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([_WORDS] * 3, trainer)
    learnt = json.loads(trained.to_str())["model"]
    # DeepSeek's structure begins at 0.
    vocabulary = {token: place + 3 for token, place in learnt["vocab"].items()}
    merges = [tuple(pair) for pair in learnt["merges"]]
    whole = Tokenizer(models.BPE(vocab={**vocabulary, **structure}, merges=merges))
    whole.pre_tokenizer, whole.decoder = bytes_of, decoders.ByteLevel()
    added = [AddedToken(t, special=t in special, normalized=False) for t in structure]
    whole.add_tokens([t for t in added if not t.special])
    whole.add_special_tokens([t for t in added if t.special])
    made = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token=next(iter(structure)))
    made.chat_template = template
    return made


class Harmony:
    """Stands in for openai_harmony's encoding, whose vocabulary would have to be downloaded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render_conversation(self, conversation: Any) -> list[int]:
        return [token for message in conversation.messages for token in self.render(message)]

    def render(self, message: Any) -> list[int]:
        role, header = message.author.role.value, message.author.name or message.author.role.value
        calls = role == "assistant" and message.recipient
        header += f" to={message.recipient}" if message.recipient else ""
        header += f"<|channel|>{message.channel}" if message.channel else ""
        text = "".join(
            part.text if hasattr(part, "text") else json.dumps(part.to_dict())
            for part in message.content
        )
        end = "<|call|>" if calls else "<|end|>"
        return self._tokenizer.encode(
            f"<|start|>{header}<|message|>{text}{end}", add_special_tokens=False
        )


def _hermes(answer: Answer) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>'
        for c in answer.tool_calls
    ]
    thought = f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""
    return thought + "\n".join(filter(None, [answer.content, *calls])) + "<|im_end|>"


def _llama(answer: Answer) -> str:
    calls = [f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in answer.tool_calls]
    return "".join([answer.content, *calls]) + "<|eot_id|>"


def _gpt_oss(answer: Answer) -> str:
    text = (answer.reasoning or "") + "<|end|>"
    for call in answer.tool_calls:
        if answer.content:
            text += f"<|start|>assistant<|channel|>commentary<|message|>{answer.content}<|end|>"
        text += (
            f"<|start|>assistant<|channel|>commentary to=functions.{call.name} "
            f"<|constrain|>json<|message|>{call.arguments}<|call|>"
        )
    if answer.tool_calls:
        return text
    return f"{text}<|start|>assistant<|channel|>final<|message|>{answer.content}<|return|>"


def _glm(answer: Answer) -> str:
    text = f"\n<think>{answer.reasoning or ''}</think>"
    text += f"\n{answer.content}" if answer.content else ""
    for number, call in enumerate(answer.tool_calls):
        text += "" if number and answer.content else "\n"
        text += f"<tool_call>{call.name}\n"
        for key, value in json.loads(call.arguments).items():
            spelled = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{spelled}</arg_value>\n"
        text += "</tool_call>"
    return text + ("<|observation|>" if answer.tool_calls else "<|user|>")


def _deepseek(answer: Answer) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.arguments}\n```"
        "<｜tool▁call▁end｜>"
        for c in answer.tool_calls
    ]
    if calls:
        calls = ["<｜tool▁calls▁begin｜>", *calls, "<｜tool▁calls▁end｜>"]
    return "".join([answer.content, *calls]) + "<｜end▁of▁sentence｜>"


def _numbered(first: int, *tokens: str) -> dict[str, int]:
    return {token: first + place for place, token in enumerate(tokens)}


_QWEN = {"<|im_end|>": 151645, "<|im_start|>": 151644, "<|endoftext|>": 151643}
_QWEN_CALLS = _numbered(151657, "<tool_call>", "</tool_call>")
_LLAMA = {
    "<|eot_id|>": 128009,
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|python_tag|>": 128010,
}
_GPT_OSS = {
    "<|return|>": 200002,
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
_DEEPSEEK_TOOLS = (
    *("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end"),
    *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    "tool▁sep",
)

FAMILIES = {
    family.name: family
    for family in [
        Family(
            "qwen3",
            "qwen3",
            _QWEN,
            _QWEN_CALLS
            | _numbered(151665, "<tool_response>", "</tool_response>", "<think>", "</think>"),
            _hermes,
            "<|im_start|>assistant\n",
            thinks=True,
        ),
        Family(
            "qwen2.5",
            "qwen2",
            _QWEN,
            _QWEN_CALLS,
            _hermes,
            "<|im_start|>assistant\n",
            template=_CHATML,
        ),
        Family(
            "llama3",
            "llama",
            _LLAMA,
            {},
            _llama,
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            calls=1,
            says_and_calls=False,
        ),
        Family(
            "gpt-oss",
            "gpt_oss",
            _GPT_OSS,
            {},
            _gpt_oss,
            "<|start|>assistant<|channel|>analysis<|message|>",
            calls=1,
            thinks=True,
            forgets=True,
        ),
        Family(
            "glm4.5",
            "glm4_moe",
            {
                "<|user|>": 151336,
                "<|observation|>": 151338,
                "<|endoftext|>": 151329,
                "[gMASK]": 151331,
                "<sop>": 151333,
                "<|system|>": 151335,
                "<|assistant|>": 151337,
            },
            _numbered(
                151350,
                *("<think>", "</think>", "<tool_call>", "</tool_call>"),
                *("<tool_response>", "</tool_response>"),
                *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            ),
            _glm,
            "<|assistant|>",
            thinks=True,
        ),
        Family(
            "deepseek-v3",
            "deepseek_v3",
            {"<｜end▁of▁sentence｜>": 1, "<｜begin▁of▁sentence｜>": 0},
            {"<｜User｜>": 128803, "<｜Assistant｜>": 128804}
            | _numbered(128806, *(f"<｜{name}｜>" for name in _DEEPSEEK_TOOLS)),
            _deepseek,
            "<｜Assistant｜>",
        ),
        Family(
            "template",
            "mystery",
            {"</s>": 2},
            {},
            lambda answer: answer.content + "</s>",
            "assistant: ",
            template=_PLAIN,
            calls=0,
        ),
    ]
}
