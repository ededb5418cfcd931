"""One surface of settings: keyword arguments, TOML keys and flags are the same."""

import json
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.cli.main import cli
from fulmen.cli.options import load_settings
from fulmen.launch.api import _plain, function_name
from fulmen.schema.config import make_config
from fulmen.schema.errors import AgentError, ConfigError
from fulmen.schema.training import TrainConfig

NEEDED = {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"}

values = st.fixed_dictionaries(
    {key: st.text("abc./: ", min_size=1).filter(str.strip) for key in NEEDED},
    optional={
        "group_size": st.integers(2, 64),
        "learning_rate": st.floats(1e-9, 1.0),
        "dynamic_sampling": st.booleans(),
        "schedule": st.sampled_from(["constant", "linear"]),
        "max_tokens": st.integers(1, 10_000),
        "grader": st.text("xyz.py:", min_size=1),
    },
)


def parsed_flags(given_values: dict[str, Any]) -> dict[str, Any]:
    """What the command line makes of flags."""
    arguments = []
    for key, value in given_values.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}={value}"]
    context = cli.commands["train"].make_context("train", arguments)
    return {key: value for key, value in context.params.items() if key in TrainConfig.model_fields}


@given(values)
def test_keywords_toml_and_flags_give_equal_settings(tmp_path_factory, chosen):
    file = tmp_path_factory.mktemp("config") / "c.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in chosen.items()))
    by_keyword = make_config(TrainConfig, chosen)
    by_toml = load_settings(TrainConfig, {}, str(file)).config
    by_flag = load_settings(TrainConfig, parsed_flags(chosen), None).config
    assert by_keyword == by_toml == by_flag


def test_flags_win_over_the_file_and_the_origin_of_each_value_is_known(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('agent = "x"\ntasks = "t"\nmodel = "m"\nseed = 1\nsteps = 7\n')
    loaded = load_settings(TrainConfig, {"seed": "2", "steps": None}, str(file))
    assert (loaded.config.seed, loaded.config.steps) == (2, 7)
    origins = [loaded.origins[name] for name in ("seed", "steps", "workers")]
    assert origins == ["flag", str(file), "default"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groupsize": 4}, "there is no setting 'groupsize'; did you mean 'group_size'?"),
        ({"group_size": 0}, "group_size is 0: input should be greater than or equal to 1"),
        ({"steps": "many"}, "steps is 'many': input should be a valid integer"),
        ({"schedule": "cosine"}, "schedule is 'cosine': input should be 'constant' or 'linear'"),
        ({"model": None}, "model is None"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(changes, message):
    with pytest.raises(ConfigError) as caught:
        make_config(TrainConfig, NEEDED | changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("seed = ", "not valid TOML"), ("nonsense = 1", "no setting 'nonsense'")],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(TrainConfig, dict(NEEDED), str(file))
    assert str(caught.value).startswith(str(file))


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file"):
        load_settings(TrainConfig, {}, "nowhere.toml")


def test_help_all_shows_every_setting():
    command = cli.commands["train"]
    context = click.Context(command, info_name="train")
    short = command.get_help(context)
    assert "--clip-high" not in short
    with pytest.raises(click.exceptions.Exit):
        command.make_context("train", ["--help-all"])


def test_functions_and_lists_can_be_given_from_python(tmp_path):
    plain = _plain({"agent": function_name, "tasks": [{"q": 1}, {"q": 2}], "val": tmp_path / "v"})
    assert plain["agent"].endswith("api.py:function_name")
    assert plain["val"] == str(tmp_path / "v")
    with open(plain["tasks"]) as file:
        assert [json.loads(line) for line in file] == [{"q": 1}, {"q": 2}]


def test_a_function_that_workers_cannot_import_is_refused():
    def local(task):
        return task

    for function in (local, lambda task: task):
        with pytest.raises(AgentError, match=r"top level of a \.py file"):
            function_name(function)
