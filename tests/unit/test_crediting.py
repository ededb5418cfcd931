"""From graded rollouts to advantages: weights, selection, rules, and what is said about them."""

import json
import math
import tomllib

import pytest
from msgspec.structs import replace

from attempts import asks, call, own_reward, result
from fulmen.cli.main import cli
from fulmen.credit.rules import Rule
from fulmen.credit.selection import by_name
from fulmen.launch.crediting import make_crediting
from fulmen.schema.config import EvalConfig, make_config
from fulmen.schema.errors import AgentError, ConfigError, GraderError
from fulmen.schema.training import TrainConfig
from fulmen.trainer.crediting import SHOWN_AGENTS, Crediting, credit_step
from fulmen.trainer.folder import open_folder
from fulmen.trainer.grading import Graded, grade
from fulmen.trainer.health import hacking_notes
from fulmen.trainer.weights import UNWEIGHTED, Weights

NEEDED = {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"}


def graded(reward: float | None, *calls, rewards=(), name="r", parts=None) -> Graded:
    calls = tuple(replace(one, rollout_id=name) for one in calls)
    rewards = [replace(one, rollout_id=name) for one in rewards]
    return Graded(result(*calls, rewards=rewards, name=name), reward, parts=parts or {})


def crediting(weights=UNWEIGHTED, rules=(), **settings) -> Crediting:
    return make_crediting(make_config(TrainConfig, NEEDED | settings), rules, weights)


def pair() -> list[Graded]:
    """One rollout that won with a tool that failed once, and one that lost."""
    failing = asks(("call_1", "add", "{}"))
    told = {"role": "tool", "tool_call_id": "call_1", "content": "Error: no"}
    return [
        graded(
            1.0,
            call(0, agent="writer", response=failing),
            call(1, agent="checker", request={"messages": [told]}),
            name="won",
        ),
        graded(0.0, call(0, agent="writer"), name="lost"),
    ]


def values(step) -> list[float]:
    return [item.advantage for item in step.credited]


def test_without_settings_every_call_has_the_advantage_of_its_rollout():
    step = credit_step(pair(), Crediting())
    assert values(step) == [1.0, 1.0, -1.0]
    assert (step.rewards, step.notes) == ([], [])
    assert step.metrics["groups/with_signal"] == 1.0
    assert step.metrics["reward/intermediate"] == 0.0


def test_a_rules_reward_reaches_the_call_the_store_and_the_metrics():
    rule = Rule(when="tool_failed", weight=-0.25, name="broke")
    step = credit_step(pair(), crediting(rules=[rule], credit="last"))
    assert values(step) == [-0.5, 1.0, -1.0]
    (reward,) = step.rewards
    assert (reward.rollout_id, reward.name, reward.value, reward.call_id, reward.source) == (
        "won", "broke", -0.25, "c0", "rule",
    )  # fmt: skip
    assert step.metrics["reward/air/broke"] == step.metrics["reward/intermediate"] == -0.125
    assert step.metrics["tools/error"] == 1.0
    assert step.metrics["tools/ok"] == step.metrics["tools/unknown"] == 0.0


def test_weights_multiply_rewards_of_rules_and_of_the_agent_by_name():
    rule = Rule(when="tool_failed", weight=-0.25)
    won, lost = pair()
    given = (own_reward(0.5, "found", call_id="c1"), own_reward(0.1, "plain", call_id="c1"))
    won = graded(1.0, *won.result.calls, rewards=given, name="won")
    weights = Weights({"tool_failed": 2.0, "found": 0.1}, ["tool_failed"])
    step = credit_step([won, lost], crediting(weights, [rule], credit="last"))
    assert values(step) == pytest.approx([-1.0, 1.0 + 2 * (0.05 + 0.1), -1.0])
    assert step.metrics["reward/air/tool_failed"] == -0.125
    assert step.metrics["reward/intermediate"] == pytest.approx((-0.5 + 0.15) / 2)


def test_calls_of_other_agents_are_not_returned_and_their_share_is_counted():
    step = credit_step(pair(), crediting(train="writer"))
    assert [item.transition.agent for item in step.credited] == ["writer", "writer"]
    assert {name: value for name, value in step.metrics.items() if name.startswith("agent/")} == {
        "agent/writer/calls": 2.0,
        "agent/writer/selected": 1.0,
        "agent/writer/trained": 1.0,
        "agent/checker/calls": 1.0,
        "agent/checker/selected": 0.0,
        "agent/checker/trained": 0.0,
    }


def test_an_agent_that_never_asked_is_named_together_with_those_that_did():
    (note,) = credit_step(pair(), crediting(train="writer,chekcer")).notes
    assert note.code == "unknown-agent"
    assert note.text == "no call of 'chekcer' in this step (train); agents seen: checker, writer"


def test_a_function_may_choose_what_is_trained(tmp_path):
    file = tmp_path / "choose_calls.py"
    file.write_text("def first(call):\n    return call.index == 0 and call.agent != 'checker'\n")
    step = credit_step(pair(), crediting(train=f"{file}:first"))
    assert [item.transition.call_id for item in step.credited] == ["c0", "c0"]
    with pytest.raises(AgentError, match=r"train .*has no 'last'"):
        crediting(train=f"{file}:last")


def test_a_function_that_cannot_choose_is_named_with_the_call(tmp_path):
    file = tmp_path / "choose_badly.py"
    file.write_text("def bad(call):\n    return call.nothing\n")
    with pytest.raises(GraderError, match=r"bad raised AttributeError.* on call c0"):
        credit_step(pair(), crediting(train=f"{file}:bad"))


def test_a_selection_without_names_is_refused():
    with pytest.raises(ConfigError, match="train names no agent"):
        crediting(train=" , ")


def test_many_agents_are_counted_together():
    calls = [call(n, agent=f"a{n:02d}") for n in range(SHOWN_AGENTS + 3)]
    metrics = credit_step([graded(1.0, *calls)], Crediting(selected=by_name(["a18"]))).metrics
    assert metrics["agent/(others)/calls"] == 3.0
    assert metrics["agent/(others)/trained"] == pytest.approx(1 / 3)
    assert "agent/a16/calls" not in metrics


def test_rollouts_without_a_reward_take_no_part():
    step = credit_step([*pair(), graded(None, call(0), name="out")], Crediting())
    assert values(step) == [1.0, 1.0, -1.0]
    assert sum(v for k, v in step.metrics.items() if k.endswith("/calls")) == 3.0


def test_rewards_of_calls_that_cannot_be_trained_are_counted():
    won, lost = pair()
    given = (own_reward(0.5, call_id="c9"), own_reward(0.5, agent="nobody"))
    won = graded(1.0, *won.result.calls, rewards=given, name="won")
    step = credit_step([won, lost], Crediting())
    assert step.metrics["credit/homeless_rewards"] == 2.0
    assert values(step) == [1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"credit": "identical"}, [2.0, 2.0, -1.0]),
        ({"credit": "last"}, [1.0, 1.0, -1.0]),
        ({"credit": "discounted", "discount": 0.5}, [1.5, 1.0, -1.0]),
        ({"credit": "reward-to-go"}, [2.0, 1.0, -1.0]),
        ({"credit": "per-agent"}, [2.0, 1.0, -1.0]),
        # The two first calls are in the same state, and what is to come is 1.5 and 0.
        ({"credit": "turn-group", "discount": 1.0, "turn_weight": 0.25}, [2.25, 2.0, -1.25]),
    ],
)
def test_every_rule_can_be_chosen_by_its_name(settings, wanted):
    won, lost = pair()
    given = [own_reward(0.5, call_id="c0")]
    won = graded(1.0, *won.result.calls, rewards=given, name="won")
    assert values(credit_step([won, lost], crediting(**settings))) == wanted


def test_the_share_of_shared_states_is_reported():
    assert credit_step(pair(), Crediting()).metrics["credit/shared_states"] == pytest.approx(2 / 3)


async def test_a_dict_from_a_grader_is_added_up_by_the_stated_weights():
    weights = Weights({"f1": 0.9, "format": 0.1})
    (item,) = await grade([result()], lambda **_: {"f1": 0.5, "format": 1.0}, "g", weights=weights)
    assert item.reward == pytest.approx(0.55)
    assert item.parts == {"f1": 0.5, "format": 1.0}


@pytest.mark.parametrize(
    ("parts", "weights", "reward"),
    [
        ({"a": 1.0, "b": 0.5}, {"a": 2.0}, 2.5),
        ({"reward": 1.0, "style": 0.5}, {"style": 0.5}, 1.25),
        ({"reward": 1.0, "style": 0.5}, {}, 1.0),
        ({"reward": 1.0}, {"reward": 0.5}, 0.5),
    ],
)
def test_a_part_without_a_weight_counts_as_it_did_before(parts, weights, reward):
    assert Weights(weights).combine(parts) == reward


async def test_a_misspelt_weight_is_refused_with_both_names():
    weights = Weights({"f1": 0.9, "format": 0.1, "tool_failed": 2.0}, ["tool_failed"])
    with pytest.raises(GraderError) as caught:
        await grade([result()], lambda **_: {"f1": 0.5, "formt": 1.0}, "g", weights=weights)
    assert str(caught.value) == (
        "grader g returned 'formt' on task 't', which reward_weights does not name; it names "
        "'format', which was not returned; did you mean 'formt'?"
    )


def test_a_weight_that_nobody_gave_a_reward_for_is_warned_of():
    weights = Weights({"f1": 0.9, "found": 0.1, "slow": 2.0}, ["slow"])
    items = [graded(1.0, call(0), parts={"f1": 1.0})]
    (note,) = credit_step(items, Crediting(weights=weights)).notes
    assert "names 'found', which nobody gave in this step; given were: f1, reward" in note.text
    items = [graded(1.0, call(0), parts={"f1": 1.0}, rewards=[own_reward(1.0, "found")])]
    assert credit_step(items, Crediting(weights=weights)).notes == []


def test_weights_are_the_same_as_flag_keyword_and_toml(tmp_path):
    wanted = {"f1": 0.9, "format": 0.1}
    arguments = [f"--{name}={value}" for name, value in NEEDED.items()]
    context = cli.commands["train"].make_context(
        "train", [*arguments, "--reward-weights", "f1=0.9, format=0.1"]
    )
    flag = make_config(TrainConfig, NEEDED | {"reward_weights": context.params["reward_weights"]})
    keyword = make_config(TrainConfig, NEEDED | {"reward_weights": wanted})
    assert flag == keyword
    folder, _ = open_folder(str(tmp_path / "run"), "run", "fail")
    with folder:
        folder.write_config(keyword, {})
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert make_config(TrainConfig, written) == keyword


@pytest.mark.parametrize("bad", ["f1", "f1=", "=1", "f1=x", "f1=nan", {"f1": math.inf}])
def test_weights_that_are_no_numbers_are_refused_in_one_line(bad):
    with pytest.raises(ConfigError, match="reward_weights"):
        make_config(EvalConfig, NEEDED | {"reward_weights": bad})


def test_earning_intermediate_rewards_instead_of_solving_is_said_with_numbers():
    finals = [0.5, 0.52, 0.48, 0.5, 0.5, 0.49, 0.5, 0.5]
    rising = [0.1, 0.12, 0.1, 0.11, 0.3, 0.31, 0.32, 0.3]
    (note,) = hacking_notes(finals, rising, window=4)
    assert note.code == "reward-hacking"
    assert "rose from 0.107 to 0.307 (means of 4 steps)" in note.text
    assert "from 0.500 to 0.497" in note.text


@pytest.mark.parametrize(
    ("finals", "intermediates"),
    [
        ([0.1, 0.2, 0.3, 0.4], [0.0, 0.1, 0.2, 0.3]),
        ([0.5] * 4, [0.3] * 4),
        ([0.5] * 4, [0.4, 0.0, 0.5, 0.1]),
        ([0.5] * 4, [0.3, 0.3, 0.1, 0.1]),
        ([0.5] * 3, [0.0, 0.0, 0.3]),
        ([0.5] * 5, [0.0, 0.0, 0.3, 0.3, 0.3]),
        ([math.nan] * 4, [0.0, 0.0, 0.3, 0.3]),
        ([], []),
    ],
    ids=["both rise", "flat", "noise", "falls", "too early", "said before", "no final", "empty"],
)
def test_nothing_is_said_where_there_is_nothing_to_say(finals, intermediates):
    notes = list(hacking_notes(finals, intermediates, window=2))
    assert [note.code for note in notes] == []


def test_a_step_with_intermediate_rewards_alone_has_signal():
    rule = Rule(when="tool_failed", weight=-0.25)
    equal = [Graded(item.result, 1.0) for item in pair()]
    metrics = credit_step(equal, crediting(rules=[rule])).metrics
    assert metrics["groups/with_signal"] == 1.0
    assert credit_step(equal, crediting()).metrics["groups/with_signal"] == 0.0


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"credit": "identical"}, 0.5),
        # Turns of the group met in one state, and ended differently soon.
        ({"credit": "turn-group", "discount": 0.5}, 1.0),
        # The mean over all tokens is not 0, so whitening moves the group without signal, too.
        ({"advantage": "group-mean", "whitening": "batch"}, 0.5),
        # Here whitening is what a group is compared by.
        ({"advantage": "none", "whitening": "batch"}, 1.0),
    ],
)
def test_the_share_with_signal_is_that_of_the_chosen_credit_rule(settings, share):
    equal = [
        replace_group(graded(1.0, call(0), call(1), name="two"), "equal"),
        replace_group(graded(1.0, call(0), name="one"), "equal"),
    ]
    metrics = credit_step([*pair(), *equal], crediting(**settings)).metrics
    assert metrics["groups/with_signal"] == share


def replace_group(item: Graded, group: str) -> Graded:
    rollout = replace(item.result.rollout, group=group)
    return Graded(replace(item.result, rollout=rollout), item.reward)


@pytest.mark.parametrize(("advantage", "share"), [("none", 0.0), ("batch-mean", 0.0)])
def test_where_all_that_is_compared_is_equal_there_is_no_signal(advantage, share):
    equal = [Graded(item.result, 1.0) for item in pair()]
    metrics = credit_step(equal, crediting(advantage=advantage, whitening="batch")).metrics
    assert metrics["groups/with_signal"] == share


def test_a_group_without_a_trained_call_has_no_signal():
    metrics = credit_step(pair(), crediting(train="nobody")).metrics
    assert metrics["groups/with_signal"] == 0.0


def test_metrics_are_json():
    rule = Rule(when="tool_failed", weight=-0.25)
    metrics = credit_step(pair(), crediting(rules=[rule])).metrics
    assert json.loads(json.dumps(metrics)) == metrics
