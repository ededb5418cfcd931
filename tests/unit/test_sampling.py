"""Dynamic sampling: which tasks a step is made of, with a real store, before and after a crash."""

from typing import Any

import pytest

from fulmen.credit.critic import GAE
from fulmen.credit.rules import Rule
from fulmen.credit.selection import by_name
from fulmen.launch.crediting import make_crediting
from fulmen.schema.errors import AgentError, ConfigError, GraderError
from fulmen.trainer.crediting import Crediting, Scorers
from fulmen.trainer.events import Event, Note
from fulmen.trainer.sampling import collect_step, leave_out_equal
from fulmen.trainer.tasks import task_order
from fulmen.trainer.weights import Weights
from small_runs import DULL, TASKS, collecting, first_tasks, score, settings, shape, train


async def test_groups_whose_rewards_are_equal_are_replaced_by_the_next_tasks(tmp_path):
    run = await train(tmp_path / "run", settings())
    order = first_tasks(60)
    for tasks in run.tasks:
        assert sum(name not in DULL for name in tasks) == 3, "every step is full"
        assert tasks[-1] not in DULL, "and asks for no task more than it needs"
    assert [name for tasks in run.tasks for name in tasks] == order[: sum(map(len, run.tasks))]
    assert any(len(tasks) > 3 for tasks in run.tasks)
    for given in run.learner.given:
        assert len(given) == 6, "three groups of two rollouts with one call each"
        assert sorted({item.advantage for item in given}) == [-1.0, 1.0]


async def test_every_rollout_that_was_run_is_counted_and_shown_with_its_reason(tmp_path):
    run = await train(tmp_path / "run", settings())
    for record, tasks in zip(run.steps, run.tasks, strict=True):
        dull = sum(name in DULL for name in tasks)
        metrics = record.metrics
        assert len(record.consumed) == metrics["collect/rollouts"] == 2 * len(tasks)
        assert metrics["collect/groups"] == len(tasks)
        assert metrics["collect/left_out"] == metrics.get("left_out/equal_rewards", 0) == 2 * dull
        assert metrics["collect/excluded"] == 0
        assert metrics["groups/with_signal"] == pytest.approx(3 / len(tasks))
        assert metrics["agent/prompt-" + agent_of(metrics) + "/trained"] == pytest.approx(
            3 / len(tasks)
        )
        # Winners of dull groups are in the mean: it tells of the tasks, not of the selection.
        assert metrics["reward/mean"] == pytest.approx((3 + 2 * dull) / (2 * len(tasks)))


def agent_of(metrics: dict[str, float]) -> str:
    (name,) = (n for n in metrics if n.startswith("agent/") and n.endswith("/calls"))
    return name.removeprefix("agent/prompt-").removesuffix("/calls")


async def test_ids_and_seeds_go_on_within_a_step(tmp_path):
    run = await train(tmp_path / "run", settings(steps=2))
    for record in run.steps:
        groups = list(dict.fromkeys(name.rpartition("-")[0] for name in record.consumed))
        assert groups == [f"{record.step:06d}-{place:04d}" for place in range(len(groups))]


async def test_a_stopped_run_goes_on_with_the_task_after_the_last_one_it_asked(tmp_path):
    whole = await train(tmp_path / "whole", settings())
    first = await train(tmp_path / "parts", settings(), stop_after=3)
    assert first.history.step == 3 < len(whole.steps)
    second = await train(tmp_path / "parts", settings(), resume=True)
    assert shape(second) == shape(whole)
    assert second.history.drawn == whole.history.drawn == sum(map(len, whole.tasks))


async def test_a_run_that_breaks_within_a_step_asks_the_same_again(tmp_path):
    whole = await train(tmp_path / "whole", settings())
    refilled = next(n for n, tasks in enumerate(whole.tasks, start=1) if n > 1 and len(tasks) > 3)

    def breaks_in_the_refill(task: Any, rollout: Any) -> float | None:
        if rollout.rollout.id.startswith(f"{refilled:06d}-0003"):
            raise RuntimeError("power cut")
        return score(task, rollout)

    with pytest.raises(GraderError, match="power cut"):
        await train(tmp_path / "parts", settings(), grader=breaks_in_the_refill)
    again = await train(tmp_path / "parts", settings(), resume=True)
    assert shape(again) == shape(whole)


async def test_steps_after_the_last_checkpoint_are_drawn_again(tmp_path):
    config = settings(checkpoint_every=2, steps=4)
    whole = await train(tmp_path / "whole", config)

    def breaks_in_step_four(task: Any, rollout: Any) -> float | None:
        if rollout.rollout.step == 4:
            raise RuntimeError("power cut")
        return score(task, rollout)

    with pytest.raises(GraderError, match="power cut"):
        await train(tmp_path / "parts", config, grader=breaks_in_step_four)
    again = await train(tmp_path / "parts", config, resume=True)
    assert [record.step for record in again.steps] == [1, 2, 3, 4]
    assert shape(again) == shape(whole)


async def test_a_resumed_run_may_ask_for_another_number_of_tasks(tmp_path):
    await train(tmp_path / "run", settings(dynamic_sampling=False, steps=2))
    run = await train(
        tmp_path / "run",
        settings(dynamic_sampling=False, steps=3, tasks_per_step=4),
        resume=True,
    )
    assert run.tasks == [first_tasks(3), first_tasks(6)[3:], first_tasks(10)[6:]]


async def test_a_step_that_finds_too_few_groups_trains_on_those_and_says_so(tmp_path):
    def all_win_but_once(rollout: Any) -> float:
        return float(rollout.rollout.id != "000001-0001-000")

    config = settings(steps=1, max_groups_factor=2.5)
    run = await train(tmp_path / "run", config, grader=all_win_but_once)
    assert run.tasks == [first_tasks(7)], "2.5 times 3, rounded down"
    assert [item.transition.rollout_id for item in run.learner.given[0]] == [
        "000001-0001-000",
        "000001-0001-001",
    ]
    (note,) = (e for e in run.events if isinstance(e, Note) and e.code == "few-groups")
    assert note.text.startswith("rewards differ in 1 of 7 groups, 3 were wanted: ")


async def test_a_step_without_any_signal_learns_nothing_and_ends(tmp_path):
    config = settings(steps=2, max_groups_factor=1)
    run = await train(tmp_path / "run", config, grader=lambda: 1.0)
    assert run.learner.given == [[], []]
    assert run.tasks == [first_tasks(3), first_tasks(6)[3:]]
    codes = {e.code for e in run.events if isinstance(e, Note)}
    assert codes == {"few-groups", "no-signal"}


async def test_a_first_step_of_equal_groups_alone_does_not_end_a_run_that_selects_agents(tmp_path):
    def equal_at_first(rollout: Any) -> float:
        sample = int(rollout.rollout.id.rpartition("-")[2])
        return 1.0 if rollout.rollout.step == 1 else float(sample)

    config = settings(steps=2, max_groups_factor=1, train="prompt-*")
    how = Crediting(selected=by_name(["prompt-*"]), patterns=["prompt-*"])
    run = await train(tmp_path / "run", config, grader=equal_at_first, crediting=how)
    assert [len(given) for given in run.learner.given] == [0, 6]


async def test_a_run_that_selects_no_call_is_ended_after_its_first_step(tmp_path):
    config = settings(steps=2, train="writer")
    how = Crediting(selected=by_name(["writer"]), patterns=["writer"])
    with pytest.raises(AgentError, match=r"train = 'writer' selects no call .* agents seen: pro"):
        await train(tmp_path / "run", config, crediting=how)


async def test_without_dynamic_sampling_all_groups_are_trained(tmp_path):
    run = await train(tmp_path / "run", settings(dynamic_sampling=False, steps=2))
    assert run.tasks == [first_tasks(3), first_tasks(6)[3:]]
    assert [len(given) for given in run.learner.given] == [6, 6]
    assert [record.metrics["collect/left_out"] for record in run.steps] == [0, 0]


@pytest.mark.parametrize(("weight", "kept"), [(1.0, 3), (0.0, 0)])
async def test_groups_that_differ_in_intermediate_rewards_alone_are_not_left_out(
    weight, kept, tmp_path
):
    """Every second rollout earns a reward of a rule, for what it asked."""
    file = tmp_path / "odd_samples.py"
    file.write_text("def odd(call, tools):\n    return call.rollout_id.endswith('1')\n")
    rule = Rule(when="predicate", function=f"{file}:odd", weight=0.5, name="odd")
    how = make_crediting(settings(), [rule], Weights({"odd": weight}, ["odd"]))
    config = settings(steps=1, max_groups_factor=1)
    run = await train(tmp_path / "run", config, grader=lambda: 0.0, crediting=how)
    assert len(run.learner.given[0]) == 2 * kept
    assert run.steps[0].metrics["groups/with_signal"] == kept / 3


async def test_groups_of_which_one_rollout_counts_have_nothing_to_compare(tmp_path):
    def only_the_first(rollout: Any) -> float | None:
        """Not applicable to all but the first sample, in the second group."""
        group, _, sample = rollout.rollout.id.rpartition("-")
        if group.endswith("-0001") and sample != "000":
            return None
        return float(sample != "000")

    events: list[Event] = []
    async with collecting(tmp_path, only_the_first, events) as (_, collector):
        graded = await collect_step(collector, settings(), 1, task_order(TASKS, 0), Crediting())
    assert [(g.left_out, g.excluded) for g in graded] == [
        ("", ""),
        ("", ""),
        ("equal_rewards", ""),
        ("", "not_applicable"),
        *[("", "")] * 4,
    ]
    assert leave_out_equal(graded, Crediting()) == graded


async def test_a_critic_or_a_reference_that_is_not_there_ends_the_run_before_any_agent_starts(
    tmp_path,
):
    for name, how, message in (
        ("critic", Crediting(critic=GAE()), "this advantage needs a critic"),
        ("kl", Crediting(kl_coefficient=0.1), "kl_in_reward needs a reference"),
    ):
        with pytest.raises(ConfigError, match=message):
            await train(tmp_path / name, settings(), crediting=how)


async def test_the_learners_values_and_divergences_reach_the_tokens(tmp_path):
    scorers = Scorers(
        values=lambda transitions: [[0.5, 0.25] for _ in transitions],
        kl=lambda transitions: [[1.0, 2.0] for _ in transitions],
    )
    how = Crediting(critic=GAE(1.0, 1.0), kl_coefficient=0.125)
    run = await train(
        tmp_path / "run", settings(steps=1), grader=lambda: 1.0, crediting=how, scorers=scorers
    )
    assert run.learner.given == [[]], "all rewards are equal, and dynamic sampling is on"
    run = await train(
        tmp_path / "all",
        settings(steps=1, dynamic_sampling=False),
        grader=lambda: 1.0,
        crediting=how,
        scorers=scorers,
    )
    for item in run.learner.given[0]:
        assert item.returns == (1.0 - 0.375, 1.0 - 0.25)
        assert item.token_advantages == (0.625 - 0.5, 0.75 - 0.25)
    assert "groups/with_signal" not in run.steps[0].metrics
