"""What users get wrong: one clear line, a status, and nothing lost."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def fulmen(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fulmen.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=120,
    )


@pytest.fixture
def place(calc, tmp_path):
    """A folder with everything a run needs, and a function that runs it with changes."""
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1?", "metadata": {"answer": 2}}\n' * 1)
    (tmp_path / "agent.py").write_text(
        "from openai import OpenAI\n"
        "client = OpenAI()\n"
        "def solve(task):\n"
        "    messages = [{'role': 'user', 'content': task['question']}]\n"
        "    answer = client.chat.completions.create(model='m', messages=messages)\n"
        "    return answer.choices[0].message.content\n"
    )
    (tmp_path / "grader.py").write_text("def score(output):\n    return len(output) > 5\n")

    def run(**changes: Any) -> subprocess.CompletedProcess[str]:
        values = {
            "agent": "agent.py:solve",
            "tasks": "tasks.jsonl",
            "grader": "grader.py:score",
            "model": str(calc / "base"),
            "out": "run",
            "steps": 1,
            "tasks-per-step": 1,
            "group-size": 2,
            "max-tokens": 8,
            "workers": 2,
        } | changes
        flags = [p for k, v in values.items() if v is not None for p in (f"--{k}", str(v))]
        return fulmen("train", *flags, cwd=tmp_path)

    run.folder = tmp_path  # type: ignore[attr-defined]
    return run


def assert_refused(done: subprocess.CompletedProcess[str], *words: str, status=2) -> None:
    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


def test_a_good_run_ends_well(place):
    done = place()
    assert done.returncode == 0, done.stderr
    assert "finished after 1 steps" in done.stdout


def test_a_missing_tasks_file(place):
    assert_refused(place(tasks="nowhere.jsonl"), "nowhere.jsonl: no such file")


def test_an_empty_tasks_file(place):
    (place.folder / "tasks.jsonl").write_text("")
    assert_refused(place(), "tasks.jsonl: holds no task")


def test_a_malformed_line_by_file_and_number(place):
    (place.folder / "tasks.jsonl").write_text('{"question": "x"}\n{"question": \n')
    assert_refused(place(), "tasks.jsonl:2: not valid JSON", "fix or delete the line")


def test_an_agent_that_does_not_import_with_the_reason(place):
    (place.folder / "agent.py").write_text("import nonesuch\n")
    assert_refused(place(), "cannot be imported: ModuleNotFoundError: No module named 'nonesuch'")


def test_an_agent_that_never_calls_the_model(place):
    (place.folder / "agent.py").write_text("def solve(task):\n    return 'I know it'\n")
    assert_refused(place(), "never called the model", "OPENAI_BASE_URL")


def test_an_agent_that_fails_on_every_task(place):
    (place.folder / "agent.py").write_text("def solve(task):\n    return task['nothing']\n")
    assert_refused(place(), "failed on all 2 tasks: KeyError: 'nothing' (agent.py:2)")


def test_a_grader_that_raises(place):
    (place.folder / "grader.py").write_text("def score(output):\n    return 1 / 0\n")
    assert_refused(place(), "grader grader.py:score raised ZeroDivisionError", "on task")


def test_a_grader_that_returns_nan(place):
    (place.folder / "grader.py").write_text("def score(output):\n    return float('nan')\n")
    assert_refused(place(), "grader grader.py:score returned nan")


def test_a_grader_that_wants_the_impossible(place):
    (place.folder / "grader.py").write_text("def score(answer_text):\n    return 1\n")
    assert_refused(place(), "wants an argument 'answer_text'")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
        (("chat_template.jinja",), "has no chat template"),
        (("config.json",), "has no config.json"),
        (("model.safetensors",), "weights of model"),
    ],
)
def test_a_model_folder_in_which_something_is_missing(place, calc, missing, words):
    shutil.copytree(calc / "base", place.folder / "model")
    for name in missing:
        (place.folder / "model" / name).unlink()
    assert_refused(place(model="./model"), words)


def test_a_model_that_is_not_there(place):
    assert_refused(place(model="./nowhere"), "no such folder")


def test_a_conversation_longer_than_the_context_is_the_agent_s_own_error(place):
    long = json.dumps({"question": "pens " * 2000})
    (place.folder / "tasks.jsonl").write_text(long + "\n")
    assert_refused(place(), "failed on all 2 tasks: BadRequestError", "maximum context length")


def test_a_port_in_use(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(place(port=port), f"127.0.0.1:{port}", "in use", "choose another --port")


def test_an_existing_run_folder_is_not_touched(place):
    assert place().returncode == 0
    before = (place.folder / "run" / "metrics.jsonl").read_bytes()
    assert_refused(place(), "run exists already", "--resume")
    assert (place.folder / "run" / "metrics.jsonl").read_bytes() == before


def test_an_unknown_flag_and_the_nearest_one(place):
    assert_refused(place(**{"group-sise": 4}), "no flag --group-sise", "did you mean --group-size?")


def test_an_unknown_key_in_a_file_and_the_nearest_one(place):
    (place.folder / "my.toml").write_text("groop_size = 4\n")
    assert_refused(
        place(config="my.toml"), "my.toml: there is no setting 'groop_size'", "'group_size'"
    )


def test_a_value_out_of_range(place):
    assert_refused(place(**{"group-size": 0}), "group_size is '0'", "greater than or equal to 1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "others.toml: no such file"),
        ("judge = 3", "others.toml: judge must be a table"),
        ("[judge]\nmodel = 'x'", "others.toml: [judge] must have either base_url or folder"),
        ("[judge]\nfolder = 'x'\nbase_url = 'http://x'", "either base_url or folder"),
        ("[judge]\nfolder = 'x'\nmodel = 'y'", "there is no setting 'model'"),
        ("[judge]\nbase_url = 'ftp://x'", "[judge]: base_url is 'ftp://x'"),
        ("[judge]\nbase_ulr = 'http://x'", "did you mean 'base_url'?"),
        (
            "[judge]\nbase_url = 'http://x'\napi_key_env = 'NO_SUCH_KEY'",
            "the environment variable NO_SUCH_KEY is not set",
        ),
    ],
)
def test_a_list_of_other_models_is_checked_before_anything_starts(place, text, words):
    if text is not None:
        (place.folder / "others.toml").write_text(text)
    done = place(**{"other-models": "others.toml"})
    assert done.returncode != 0
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (place.folder / "run").exists()
