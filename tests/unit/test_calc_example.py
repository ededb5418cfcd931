"""The Calc example: tasks, tools, grader, loader, and the base model's format."""

import importlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.cli.options import load_settings
from fulmen.schema.training import TrainConfig


@pytest.fixture(scope="module")
def load(calc_modules):
    return importlib.import_module


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_questions_are_never_training_questions(calc):
    train = {line["question"] for line in lines(calc / "train.jsonl")}
    val = {line["question"] for line in lines(calc / "val.jsonl")}
    assert (len(train), len(val)) == (4000, 256)
    assert not train & val


def test_the_shipped_tasks_are_those_that_the_script_makes(load, calc):
    tasks = load("tasks")
    made = [p.question for p in itertools.islice(tasks.problems(7, "val"), 256)]
    assert made == [line["question"] for line in lines(calc / "val.jsonl")]


def test_every_template_s_answer_follows_from_its_numbers(load):
    tasks = load("tasks")
    for problem in itertools.islice(tasks.problems(3, "train"), 500):
        numbers = [int(n) for n in problem.question.replace(".", " ").split() if n.isdigit()]
        assert list(problem.numbers) == numbers
        results = set()
        for a, b in itertools.permutations(numbers[:2]):
            results |= {a + b, a - b, a * b, a / b}
        if len(numbers) == 3:
            c = numbers[2]
            results |= {r + c for r in results} | {r - c for r in results}
        assert problem.answer in results
        assert problem.answer >= 0


@pytest.mark.parametrize("module", ["agent", "plain_agent"])
@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("7/2", "3.50"),
        ("6/3", "2"),
        ("-5+2", "-3"),
        ("1/0", "error: division by zero"),
        ("__import__('os')", "error: not"),
        ("2**99999999", "error: not"),
        ("9" * 100, "error: not"),
        ("(" * 50, "error: not"),
        ("", "error: not"),
        ("x", "error: not"),
        ("True+1", "error: not"),
        ("1e308*10", "error: the result is too large"),
        ("1e308*10-1e308*10", "error: the result is too large"),
        ("9e999", "error: the result is too large"),
    ],
)
def test_the_calculator_works_out_arithmetic_and_nothing_else(load, module, expression, result):
    assert load(module).calculator(expression).startswith(result)


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("<answer>12</answer>", True),
        ("I think <answer> 12.0 apples </answer>.", True),
        ("<answer>3</answer> no, <answer>12</answer>", True),
        ("<answer>1,2</answer>", True),
        ("12", False),
        ("<answer>11 or 12</answer>", False),
        ("<answer></answer>", False),
        ("<answer>nan</answer>", False),
        ("<answer>1e999</answer>", False),
        (None, False),
        (12, False),
    ],
)
def test_only_one_tagged_number_counts_as_an_answer(load, output, right):
    assert load("grader").score({"answer": 12}, output) is right


@given(st.text())
def test_the_grader_never_raises(calc_modules, text):
    grader = importlib.import_module("grader")
    assert grader.score({"answer": 1}, f"<answer>{text}</answer>") in (True, False)


def test_calc_x_files_become_tasks_and_rows_without_a_number_are_counted(load, tmp_path):
    calcx = load("calcx")
    rows = [
        {
            "id": "gsm8k__1",
            "question": "Q1",
            "chain": "",
            "result": "1_200",
            "result_float": 1200.0,
        },
        {"id": "ape210k__2", "question": "Q2", "chain": "", "result": "3/4", "result_float": None},
        {"id": "x__3", "question": "Q3", "chain": "", "result": "25%", "result_float": None},
        {"id": "aqua__4", "question": "Q4", "chain": "", "result": "A", "result_float": None},
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert calcx.convert(source, tmp_path / "out.jsonl") == (3, 1)
    made = lines(tmp_path / "out.jsonl")
    assert [line["metadata"]["answer"] for line in made] == [1200.0, 0.75, 0.25]
    assert made[0]["id"] == "gsm8k__1"


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"id": 1', ":1: not valid JSON"), ("[]", ":1: not an object"), ("{}", "no column 'id'")],
)
def test_a_file_that_is_not_calc_x_is_refused_by_line(load, tmp_path, text, message):
    calcx = load("calcx")
    source = tmp_path / "rows.jsonl"
    source.write_text(text)
    with pytest.raises(calcx.BadFile, match=message):
        calcx.convert(source, tmp_path / "out.jsonl")


def test_warm_start_conversations_are_exactly_what_the_gateway_renders(load, renderer, tokenizer):
    plain, build = load("plain_agent"), load("build_base")
    problem = next(load("tasks").problems(1, "train"))
    conversation = build.Format(tokenizer).conversation(problem, "2+3")
    asked = [
        {"role": "system", "content": plain.INSTRUCTIONS},
        {"role": "user", "content": problem.question},
    ]
    prompt = renderer.render(asked, [plain.CALCULATOR], {})
    assert tuple(conversation.ids[: len(prompt)]) == prompt
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = conversation.ids[len(prompt) : conversation.ids.index(end, len(prompt)) + 1]
    answer = renderer.parse(prompt, call, [plain.CALCULATOR])
    (requested,) = answer.tool_calls
    assert (requested.name, json.loads(requested.arguments)) == (
        "calculator",
        {"expression": "2+3"},
    )
    function = {"name": requested.name, "arguments": requested.arguments}
    said = [
        *asked,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    extended = renderer.extend((prompt, tuple(call)), said, 3, [plain.CALCULATOR], {})
    assert tuple(conversation.ids[: len(extended)]) == extended


def test_the_warm_start_never_shows_the_task(load):
    """Operators are chance: of all the expressions, about one in ten is right."""
    import random

    build, tasks, plain = load("build_base"), load("tasks"), load("plain_agent")
    rng, source = random.Random(0), tasks.problems(5, "train")
    right = 0
    for problem in itertools.islice(source, 3000):
        result = plain.calculator(build.random_expression(rng, problem))
        right += result == str(problem.answer)
    assert 0.07 < right / 3000 < 0.15


def test_the_habits_of_the_warm_start_are_right_for_one_wording_of_twelve(load):
    build, tasks, plain = load("build_base"), load("tasks"), load("plain_agent")
    right = set()
    for problem in itertools.islice(tasks.problems(5, "train"), 600):
        operator = build.habit(problem.question)
        first, second, *rest = problem.numbers
        tried = (f"{first}{operator}{second}",)
        if rest:
            tried = tuple(f"{tried[0]}{other}{rest[0]}" for other in "+-*/")
        if str(problem.answer) in map(plain.calculator, tried):
            right.add(problem.question.split()[-1] + str(len(problem.numbers)) + operator)
    assert len(right) == 1


def test_the_shipped_base_is_small(calc):
    assert sum(path.stat().st_size for path in (calc / "base").iterdir()) < 5_000_000


def test_the_configuration_for_the_real_data_is_one_that_fulmen_reads(calc):
    loaded = load_settings(TrainConfig, {}, str(calc / "config-gpu.toml"))
    assert loaded.config.model == "meta-llama/Llama-3.2-3B-Instruct"
    for target in (loaded.config.agent, loaded.config.grader):
        assert target is not None
        assert (calc / target.partition(":")[0]).is_file()
