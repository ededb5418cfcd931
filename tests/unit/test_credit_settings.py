"""The settings of advantages: what each means on the same two rollouts, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace as changed

import numpy as np
import pytest
from msgspec.structs import replace

from attempts import call, own_reward, result
from fulmen.launch.api import _plain
from fulmen.launch.crediting import make_crediting
from fulmen.schema.config import make_config
from fulmen.schema.errors import AgentError, ConfigError, DataError, GraderError
from fulmen.schema.fitting import CRITIC_ADVANTAGES
from fulmen.schema.records import Task, Transition
from fulmen.schema.training import ADVANTAGES, TrainConfig
from fulmen.trainer.crediting import Crediting, Scorers, TokenScorer, credit_step
from fulmen.trainer.grading import Graded
from fulmen.trainer.weights import UNWEIGHTED

NEEDED = {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"}


def config(**settings) -> TrainConfig:
    return make_config(TrainConfig, NEEDED | settings)


def crediting(**settings) -> Crediting:
    return make_crediting(config(**settings), (), UNWEIGHTED)


def graded(name: str, reward: float, *tokens: int, group="g", metadata=None, rewards=()) -> Graded:
    """A rollout with a call for each number of sampled tokens."""
    calls = [
        call(
            n,
            id=f"{name}-{n}",
            rollout_id=name,
            agent="a",
            prompt_ids=(1, n),
            completion_ids=(3,) * k,
            logprobs=(-0.5,) * k,
        )
        for n, k in enumerate(tokens)
    ]
    given = [replace(one, rollout_id=name) for one in rewards]
    done = result(*calls, rewards=given, name=name, group=group)
    task = Task(id=f"task of {name}", input=None, metadata=metadata or {})
    return Graded(replace(done, rollout=replace(done.rollout, task=task)), reward)


def asked_of(item: Graded, *policies: str) -> Graded:
    """The same with calls of these policies."""
    calls = zip(item.result.calls, policies, strict=True)
    asked = tuple(replace(one, policy=policy) for one, policy in calls)
    return changed(item, result=replace(item.result, calls=asked))


def pair() -> list[Graded]:
    """One that won with two calls of one and two tokens, and one that lost with one of one."""
    return [graded("won", 1.0, 1, 2), graded("lost", 0.0, 1)]


def values(step) -> list[float]:
    return [item.advantage for item in step.credited]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [1.0, 1.0, -1.0]),
        ({"advantage": "grpo"}, [1.0, 1.0, -1.0]),
        ({"advantage": "group-mean"}, [0.5, 0.5, -0.5]),
        ({"advantage": "rloo"}, [1.0, 1.0, -1.0]),
        ({"advantage": "maxrl"}, [1.0, 1.0, -1.0]),
        ({"advantage": "batch-mean"}, [0.5, 0.5, -0.5]),
        ({"advantage": "none"}, [1.0, 1.0, 0.0]),
        ({"advantage": "none", "whitening": "batch"}, [3**-0.5, 3**-0.5, -(3**0.5)]),
        # The deviation of the final rewards is that of states, too; without it, neither has one.
        ({"credit": "turn-group", "discount": 1.0}, [2.0, 1.0, -2.0]),
        (
            {"credit": "turn-group", "discount": 1.0, "advantage": "group-mean"},
            [1.0, 0.5, -1.0],
        ),
    ],
)
def test_each_setting_gives_the_advantages_of_its_formula(settings, wanted):
    assert values(credit_step(pair(), crediting(**settings))) == pytest.approx(wanted)


def test_tokens_are_discounted_one_by_one():
    how = crediting(credit="token-discounted", token_discount=0.5, advantage="none")
    step = credit_step(pair(), how)
    assert [item.token_advantages for item in step.credited] == [(0.25,), (0.5, 1.0), (0.0,)]
    assert values(step) == [0.25, 0.75, 0.0]


def scorers(**given: float) -> Scorers:
    """The same number for every token."""

    def scorer(value: float) -> TokenScorer:
        return lambda transitions: [[value] * len(t.completion_ids) for t in transitions]

    return Scorers(**{name: scorer(value) for name, value in given.items()})


def test_divergence_is_taken_off_the_reward_of_its_token():
    how = crediting(advantage="none", kl_coefficient=0.5, kl_in_reward=True)
    step = credit_step(pair(), how, scorers(kl=0.25))
    assert [item.token_advantages for item in step.credited] == [
        (0.625,),
        (0.75, 0.875),
        (-0.125,),
    ]
    assert step.metrics["learn/kl_reference"] == 0.25
    assert step.metrics["groups/with_signal"] == 1.0
    in_loss = crediting(advantage="none", kl_coefficient=0.5)
    assert values(credit_step(pair(), in_loss)) == [1.0, 1.0, 0.0]


def test_divergence_is_shown_for_each_policy_and_is_no_signal():
    """Nothing was rewarded; of three tokens of one policy two diverge, and none of the other."""
    first = asked_of(graded("one", 0.0, 1, 2), "main", "writer")
    second = asked_of(graded("other", 0.0, 1), "main")
    how = crediting(kl_coefficient=0.5, kl_in_reward=True)

    def kl(calls: Sequence[Transition]) -> list[list[float]]:
        return [[0.25 * (c.policy == "writer")] * len(c.completion_ids) for c in calls]

    step = credit_step([first, second], changed(how, policies=["main", "writer"]), Scorers(kl=kl))
    told = {name: value for name, value in step.metrics.items() if name.endswith("kl_reference")}
    assert told == {"learn/main/kl_reference": 0.0, "learn/writer/kl_reference": 0.25}
    assert step.metrics["groups/with_signal"] == 0.0


def test_a_critic_over_tokens_and_over_turns():
    values_of = scorers(values=0.5)
    how = crediting(advantage="gae", token_discount=1.0, gae_lambda=0.0)
    step = credit_step(pair(), how, values_of)
    assert [item.token_advantages for item in step.credited] == [(0.0,), (0.0, 0.5), (-0.5,)]
    assert [item.returns for item in step.credited] == [(0.5,), (0.5, 1.0), (0.0,)]
    how = crediting(advantage="turn-gae", discount=0.5, gae_lambda=1.0)
    step = credit_step(pair(), how, values_of)
    assert [item.token_advantages for item in step.credited] == [(0.0,), (0.5, 0.5), (-0.5,)]


def test_without_a_critic_there_is_no_gae():
    with pytest.raises(ConfigError, match="needs a critic"):
        credit_step(pair(), crediting(advantage="gae"))


def test_kinds_of_tasks_are_whitened_apart_by_the_key_of_their_metadata():
    items = [
        graded("a", 1.0, 1, metadata={"env": "sql"}),
        graded("b", 0.0, 1, metadata={"env": "sql"}),
        graded("c", 300.0, 1, group="h", metadata={"env": 7}),
        graded("d", 100.0, 3, group="h", metadata={"env": 7}),
    ]
    how = crediting(advantage="none", whitening="task", task_kind="env")
    step = credit_step(items, how)
    assert [item.kind for item in step.credited] == ["sql", "sql", "7", "7"]
    assert values(step) == pytest.approx([1.0, -1.0, 3**0.5, -(3**-0.5)])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "task 'task of a': 'env' of its metadata is not there"),
        ({"env": ["sql"]}, r"'env' of its metadata is \"\['sql'\]\", no name"),
    ],
)
def test_a_task_that_does_not_say_its_kind_is_named(metadata, message):
    how = crediting(whitening="task", task_kind="env")
    with pytest.raises(DataError, match=message):
        credit_step([graded("a", 1.0, 1, metadata=metadata)], how)


def test_a_rollout_that_is_too_long_loses_reward_before_the_baseline_and_shows_it():
    how = crediting(advantage="none", overlong_tokens=3, overlong_buffer=2, overlong_penalty=0.5)
    step = credit_step(pair(), how)
    assert values(step) == [0.5, 0.5, 0.0]
    (reward,) = step.rewards
    assert (reward.rollout_id, reward.name, reward.value, reward.source) == (
        "won",
        "overlong",
        -0.5,
        "rule",
    )
    assert step.metrics["reward/overlong"] == -0.25
    assert step.metrics["reward/intermediate"] == 0.0
    assert values(credit_step(pair(), crediting(overlong_tokens=3))) == [1.0, 1.0, -1.0]


def test_left_out_rollouts_are_counted_and_take_no_part_in_any_baseline():
    dull = [changed(graded(name, 5.0, 1, group="h"), left_out="equal_rewards") for name in "xy"]
    step = credit_step([*pair(), *dull], crediting(advantage="batch-mean", whitening="batch"))
    alone = credit_step(pair(), crediting(advantage="batch-mean", whitening="batch"))
    assert step.credited == alone.credited
    assert step.metrics["agent/a/calls"] == 5.0
    assert step.metrics["agent/a/selected"] == 1.0
    assert step.metrics["agent/a/trained"] == pytest.approx(3 / 5)


OWN = """
import numpy as np
def best_first(rewards, groups):
    return rewards - rewards.max()
def with_units(rewards, groups):
    assert isinstance(groups, list) and len(groups) == len(rewards)
    return rewards * 2, np.full(len(rewards), 0.5)
def careless(rewards, groups):
    rewards[:] = 7.0
    return rewards
def short(rewards, groups):
    return rewards[:1]
def broken(rewards, groups):
    return rewards.nothing
def words(rewards, groups):
    return ["much"] * len(rewards)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("own") / "own_advantages.py"
    file.write_text(OWN)
    return str(file)


def test_a_function_of_ones_own_is_an_advantage(own):
    given = [own_reward(0.25, call_id="won-0")]
    items = [graded("won", 1.0, 1, 2, rewards=given), graded("lost", 0.0, 1)]
    step = credit_step(items, crediting(advantage=f"{own}:best_first", credit="last"))
    assert values(step) == [0.25, 0.0, -1.0]
    step = credit_step(items, crediting(advantage=f"{own}:with_units", credit="last"))
    assert values(step) == [0.5, 2.0, 0.0]
    assert values(credit_step(pair(), crediting(advantage=f"{own}:careless"))) == [7.0] * 3


def test_a_function_that_gives_no_advantages_is_refused(own):
    with pytest.raises(DataError, match="the values of the advantage function are not 2 finite"):
        credit_step(pair(), crediting(advantage=f"{own}:short"))
    for name, reason in (("broken", "AttributeError"), ("words", "ValueError")):
        with pytest.raises(GraderError, match=f"advantage .*own_advantages.py:{name} .* {reason}"):
            credit_step(pair(), crediting(advantage=f"{own}:{name}"))
    with pytest.raises(AgentError, match=r"advantage .*has no 'lost'"):
        crediting(advantage=f"{own}:lost")


def test_from_python_a_function_may_be_given_as_it_is():
    assert _plain({"advantage": np_mean})["advantage"].endswith("test_credit_settings.py:np_mean")


def np_mean(rewards, groups):
    return rewards - np.mean(rewards)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_name_of_an_advantage_is_one(name):
    how = crediting(advantage=name)
    assert (how.critic is not None) == (name in CRITIC_ADVANTAGES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "grop"}, "advantage is 'grop': did you mean 'grpo'?; or file.py:function"),
        ({"group_size": 1}, "group_size is 1 and advantage 'grpo' compares the rollouts of a gr"),
        ({"group_size": 1, "advantage": "maxrl"}, "group_size is 1 and advantage 'maxrl'"),
        (
            {"group_size": 1, "advantage": "none", "dynamic_sampling": True},
            "dynamic_sampling looks for groups that differ; group_size is 1",
        ),
        ({"advantage": "gae", "credit": "last"}, "credit 'last' does not go with advantage 'gae'"),
        ({"whitening": "task"}, "whitening 'task' needs task_kind, a key of the tasks' metadata"),
        ({"overlong_tokens": 5, "overlong_buffer": 6}, "overlong_buffer is 6, more than overlong"),
        ({"kl_in_reward": True}, "kl_in_reward needs a kl_coefficient above 0"),
        (
            {"advantage": "gae", "critic": "shared", "critic_model": "m"},
            "critic_model is ignored unless critic is 'own'",
        ),
        ({"whitening": "all"}, "whitening is 'all': input should be 'none', 'batch' or 'task'"),
        ({"max_groups_factor": 0.5}, "max_groups_factor is 0.5: input should be greater than or"),
        ({"gae_lambda": 1.5}, "gae_lambda is 1.5: input should be less than or equal to 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("advantage", ["none", "batch-mean", "gae", "turn-gae", "own.py:function"])
def test_a_group_of_one_is_fine_where_rollouts_of_a_task_are_not_compared(advantage):
    assert config(group_size=1, advantage=advantage).group_size == 1
