"""The format of the Calc example's model, with its own tokenizer."""

from fulmen.gateway.render import make_renderer

TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "What is 17 * 3?"}


def test_prompts_are_those_of_the_models_own_chat_template(tokenizer):
    for messages in ([QUESTION], [{"role": "system", "content": "Be brief."}, QUESTION]):
        for tools in (None, [TOOL]):
            own = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False
            )
            ours = make_renderer(tokenizer, "qwen3").render(messages, tools, {})
            assert list(ours) == list(own)


def test_a_call_is_read_and_its_conversation_continued_token_for_token(tokenizer):
    renderer = make_renderer(tokenizer, "qwen3")
    prompt = renderer.render([QUESTION], [TOOL], {})
    text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "17*3"}}\n</tool_call>'
    completion = tuple(tokenizer.encode(text + "<|im_end|>", add_special_tokens=False))
    (call,) = renderer.parse(prompt, completion, [TOOL]).tool_calls
    assert call.name == "calculate"
    function = {"name": call.name, "arguments": call.arguments}
    said = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "51"}
    longer = renderer.extend((prompt, completion), [QUESTION, said, result], 2, [TOOL], {})
    assert longer is not None
    served = prompt + completion
    assert longer[: len(served)] == served
    assert "51" in tokenizer.decode(longer[len(served) :])
