"""OpenAI's completions: text and tokens in, text out, and continuing what was served."""

import pytest

from gateways import Face

PATH = "/completions"


async def test_a_text_prompt_is_completed_as_it_stands(tokenizer):
    face = Face(tokenizer, " 4, of course")
    answer = await face.ask(PATH, prompt="2 + 2 =", max_tokens=20)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" 4, of course", "stop")
    (call,) = face.calls
    assert list(call.prompt_ids) == face.ids("2 + 2 =")
    assert (call.id, call.protocol) == (answer["id"], "completions")
    assert answer["usage"]["total_tokens"] == len(call.prompt_ids) + len(call.completion_ids)


async def test_several_prompts_and_choices_come_back_in_order(tokenizer):
    face = Face(tokenizer, "a", "b", "c", "d")
    answer = await face.ask(PATH, prompt=["one", "two"], n=2)
    assert sorted(choice["text"] for choice in answer["choices"]) == list("abcd")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [tokenizer.decode(call.prompt_ids) for call in face.calls]
    assert prompts == ["one", "one", "two", "two"]


async def test_token_prompts_reach_the_engine_untouched(tokenizer):
    face = Face(tokenizer, "x", "y")
    await face.ask(PATH, prompt=[5, 6, 7])
    await face.ask(PATH, prompt=[[8, 9]])
    assert [request.prompt_ids for request in face.engine.requests] == [(5, 6, 7), (8, 9)]


async def test_a_prompt_that_repeats_prompt_and_completion_keeps_the_sampled_tokens(tokenizer):
    letters = [*face_ids(tokenizer, "p"), *face_ids(tokenizer, "e"), *face_ids(tokenizer, "n")]
    face = Face(tokenizer, letters, "!")
    first = await face.ask(PATH, prompt="one ", max_tokens=3)
    assert first["choices"][0]["finish_reason"] == "length"
    await face.ask(PATH, prompt="one pen and")
    one, two = face.calls
    assert two.parent == one.id
    assert two.prompt_ids[: len(one.prompt_ids) + 3] == one.prompt_ids + tuple(letters)


def face_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


async def test_log_probabilities_have_the_form_of_the_old_protocol(tokenizer):
    face = Face(tokenizer, "one two")
    answer = await face.ask(PATH, prompt="x", logprobs=0)
    probabilities = answer["choices"][0]["logprobs"]
    size = len(face.calls[0].completion_ids)
    assert [len(probabilities[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [
        size
    ] * 3


async def test_a_stop_string_ends_the_text_before_it(tokenizer):
    face = Face(tokenizer, "yes\nno", "yes\nno")
    for stream in (False, True):
        if stream:
            events = await face.events(PATH, prompt="x", stop="\n")
            text = "".join(e["choices"][0]["text"] for e in events[:-1])
        else:
            text = (await face.ask(PATH, prompt="x", stop="\n"))["choices"][0]["text"]
        assert text == "yes"


async def test_a_completion_without_a_limit_has_the_protocol_s_sixteen_tokens(tokenizer):
    face = Face(tokenizer, [9] * 40)
    await face.ask(PATH, prompt="x")
    assert len(face.calls[0].completion_ids) == 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_the_parameter_s_name(tokenizer, body, param):
    response = await Face(tokenizer).post(PATH, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
