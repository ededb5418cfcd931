"""Tasks in, rewards out, folders kept: the contract with the user."""

import asyncio
import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fulmen.schema.config import EvalConfig
from fulmen.schema.errors import AgentError, ConfigError, DataError, GraderError
from fulmen.schema.records import Call, Outcome, Rollout, RolloutResult, Task, VersionSpan
from fulmen.schema.training import TrainConfig
from fulmen.trainer.folder import open_folder
from fulmen.trainer.grading import AgentErrors, Graded, check_grader, grade
from fulmen.trainer.health import failure_notes, refuse_hopeless, step_notes
from fulmen.trainer.rollouts import eval_rollouts, train_rollouts
from fulmen.trainer.statistics import mean_interval, rollout_metrics
from fulmen.trainer.tasks import read_tasks, task_order


def result(output=None, *, failure=None, error="", calls=(), group="g") -> RolloutResult:
    task = Task(id="t", input={"question": "1+1?"}, metadata={"answer": 2})
    return RolloutResult(
        rollout=Rollout(id="r", task=task, group=group, step=1),
        attempt=1,
        outcome=Outcome(output=output, failure=failure, error=error),
        calls=calls,
    )


def chat_call() -> Call:
    answer = {"role": "assistant", "content": "2"}
    return Call(
        id="c",
        rollout_id="r",
        attempt=1,
        index=0,
        protocol="chat",
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-1.0,),
        versions=(VersionSpan(start=0, version=0),),
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
        request={"messages": [{"role": "user", "content": "1+1?"}]},
        response=answer,
    )


def graded(grader, *results, errors=None) -> list[Graded]:
    return asyncio.run(grade(results, grader, "g.py:score", errors or AgentErrors()))


def write(path, text) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_task_line_is_split_into_input_id_and_metadata(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"id": 7, "q": "x", "metadata": {"a": 1}}\n\n"plain"\n')
    first, second = read_tasks(path)
    assert first == Task(id="7", input={"q": "x"}, metadata={"a": 1})
    assert second.input == "plain"


def test_a_task_without_id_has_the_same_name_in_every_run(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"q": 1}\n')
    assert read_tasks(path)[0].id == read_tasks(path)[0].id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"q": 1}\n{"q": \n', r"t.jsonl:2: not valid JSON \(.+\); fix or delete the line"),
        ("", "holds no task"),
        ("\n \n", "holds no task"),
        ('{"metadata": 3}', "t.jsonl:1: metadata is a int, not an object"),
        ('{"id": [1]}', "t.jsonl:1: id is"),
        ('{"id": 1}\n{"id": 1}', "have the same id '1'"),
    ],
)
def test_a_bad_tasks_file_is_refused_by_file_line_and_reason(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        read_tasks(write(tmp_path / "t.jsonl", text))
    assert "\n" not in str(caught.value)


def test_a_missing_tasks_file_is_named():
    with pytest.raises(DataError, match=r"nowhere.jsonl: no such file"):
        read_tasks("nowhere.jsonl")


@given(st.integers(1, 9), st.integers(0, 5))
def test_every_pass_over_the_tasks_has_each_once(count, seed):
    tasks = [Task(id=str(i), input=i) for i in range(count)]
    order = [task.id for task in islice(task_order(tasks, seed), 3 * count)]
    for start in range(0, 3 * count, count):
        assert sorted(order[start : start + count]) == sorted(t.id for t in tasks)


def test_rollouts_asked_again_are_the_same_with_the_same_seeds():
    config = TrainConfig(agent="a", tasks="t", model="m", group_size=3)
    tasks = [Task(id="1", input=1), Task(id="2", input=2)]
    once, again = (train_rollouts(config, 4, tasks) for _ in range(2))
    assert once == again
    assert len({r.id for r in once}) == len({r.seed for r in once}) == 6
    assert [r.group for r in once] == ["000004-0000"] * 3 + ["000004-0001"] * 3
    assert once[0].seed != train_rollouts(config, 5, tasks)[0].seed


def test_evaluation_rollouts_are_greedy_and_never_trained():
    config = EvalConfig(agent="a", tasks="t", model="m")
    (rollout,) = eval_rollouts(config, 0, [Task(id="1", input=1)], temperature=0.0)
    assert rollout.split == "eval"
    assert rollout.sampling.temperature == 0.0


def test_a_grader_gets_what_it_names_and_nothing_else():
    seen = {}

    def score(output, task, messages, tools, rollout, group):
        seen.update(locals())
        return True

    (item,) = graded(score, result("2", calls=(chat_call(),)))
    assert item.reward == 1.0
    assert seen["task"] == {"question": "1+1?", "answer": 2}
    assert seen["messages"][-1] == {"role": "assistant", "content": "2"}
    assert seen["tools"] == []
    assert seen["rollout"].rollout.id == "r"
    assert len(seen["group"]) == 1


def test_an_async_grader_is_awaited():
    async def score(output):
        return 0.25

    assert graded(score, result("x"))[0].reward == 0.25


def test_none_from_a_grader_leaves_the_rollout_out_and_is_never_a_zero():
    (item,) = graded(lambda **_: None, result("x"))
    assert item.reward is None
    assert item.excluded == "not_applicable"


def test_a_dict_from_a_grader_is_named_rewards():
    first, second = graded(
        lambda output: output, result({"reward": 1, "style": 0.5}), result({"a": 1, "b": 0.5})
    )
    assert (first.reward, first.parts) == (1.0, {"reward": 1.0, "style": 0.5})
    assert second.reward == 1.5


def test_rewards_are_kept_with_their_names_and_where_they_came_from():
    (item,) = graded(lambda output: output, result({"reward": 1, "style": 0.5}))
    kept = [(reward.name, reward.value, reward.source) for reward in item.rewards()]
    assert kept == [("reward", 1.0, "grader"), ("style", 0.5, "grader")]
    (excluded,) = graded(lambda **_: None, result("x"))
    assert excluded.rewards() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, "1", [1], {}, {"a": math.nan}, object()])
def test_what_is_no_reward_is_refused_with_grader_task_and_value(bad):
    with pytest.raises(GraderError, match=r"g\.py:score.* on task 't'"):
        graded(lambda **_: bad, result("x"))


def test_a_grader_that_raises_is_named_with_the_reason():
    def score(output):
        raise KeyError("answer")

    with pytest.raises(GraderError, match=r"g\.py:score raised KeyError.*on task 't'"):
        graded(score, result("x"))


def test_a_grader_wanting_something_unknown_is_told_the_nearest_name():
    def score(taks):
        return 1

    with pytest.raises(GraderError, match="did you mean 'task'"):
        check_grader(score, "score")


def test_optional_arguments_of_a_grader_are_left_alone():
    def score(output, *, strict=True):
        return strict

    assert check_grader(score, "score") == ("output",)


@pytest.mark.parametrize(("output", "reward"), [(0.5, 0.5), (True, 1.0), (3, 3.0)])
def test_an_agent_may_return_its_own_reward(output, reward):
    (item,) = graded(None, result(output))
    assert (item.reward, item.source) == (reward, "agent")


def test_an_answer_without_a_grader_is_an_error_that_says_what_to_do():
    with pytest.raises(GraderError, match="there is no grader; give --grader"):
        graded(None, result("forty-two"))


@pytest.mark.parametrize("failure", ["infrastructure", "timeout", "cancelled"])
def test_infrastructure_failures_are_no_lessons(failure):
    (item,) = graded(lambda **_: 1.0, result(failure=failure))
    assert (item.reward, item.excluded) == (None, failure)


def test_an_exception_in_the_agent_gets_the_set_reward_or_is_left_out():
    failed = result(failure="agent", error="ValueError: x")
    (penalised,) = graded(lambda **_: 1.0, failed, errors=AgentErrors("penalise", -1.0))
    (excluded,) = graded(lambda **_: 1.0, failed, errors=AgentErrors("exclude"))
    assert (penalised.reward, penalised.source) == (-1.0, "failure")
    assert (excluded.reward, excluded.excluded) == (None, "agent")


def test_an_agent_that_never_calls_the_model_is_refused():
    with pytest.raises(AgentError, match="never called the model"):
        refuse_hopeless([Graded(result("2"), 1.0)])
    refuse_hopeless([Graded(result("2"), 1.0), Graded(result("2", calls=(chat_call(),)), 1.0)])


def test_an_agent_that_fails_on_every_task_is_refused_with_its_error():
    failed = Graded(result(failure="agent", error="ZeroDivisionError: division by zero"), 0.0)
    with pytest.raises(AgentError, match="failed on all 2 tasks: ZeroDivisionError"):
        refuse_hopeless([failed, failed])


def refused_call(**changes) -> Call:
    error = {"error": {"message": "maximum context length is 512 tokens"}}
    nothing = {"prompt_ids": (), "completion_ids": (), "logprobs": (), "versions": ()}
    told = {"status": 400, "finish_reason": "error", "response": error}
    return replace(chat_call(), **{"id": "refused", **nothing, **told, **changes})


def test_an_agent_whose_every_request_is_refused_is_told_the_first_refusal():
    item = Graded(result("2", calls=(refused_call(),)), 1.0)
    with pytest.raises(AgentError, match=r"all 2 requests .* with 400: .*maximum context length"):
        refuse_hopeless([item, item])
    refuse_hopeless([item, Graded(result("2", calls=(chat_call(),)), 1.0)])


def test_refused_calls_are_counted_and_change_no_other_figure():
    plain, refused = (chat_call(),), (chat_call(), refused_call(), refused_call(id="again"))
    one, other = (
        rollout_metrics(graded(lambda output: output == "2", result("2", calls=calls)), 1.0)
        for calls in (plain, refused)
    )
    assert (one["collect/refused_calls"], other["collect/refused_calls"]) == (0, 2)
    assert other | {"collect/refused_calls": 0} == one


def test_a_model_elsewhere_tells_no_tokens_so_it_is_in_no_mean_of_them():
    elsewhere = replace(chat_call(), prompt_ids=(), completion_ids=(), finish_reason="external")
    metrics = rollout_metrics([Graded(result("2", calls=(chat_call(), elsewhere)), 1.0)], 1.0)
    assert metrics["collect/calls_per_rollout"] == 2
    assert metrics["collect/prompt_tokens"] == metrics["collect/completion_tokens"] == 1


def test_a_grader_reads_the_conversation_of_the_last_call_that_was_answered():
    said, calls = [], (chat_call(), refused_call())
    graded(lambda messages: said.extend(messages) or 0, result("2", calls=calls))
    assert [message["role"] for message in said] == ["user", "assistant"]


def test_a_step_without_signal_is_explained_in_words():
    (note,) = step_notes({"groups/with_signal": 0.0, "reward/mean": 0.01})
    assert "too hard" in note.text


def test_exclusions_are_counted_by_reason_and_not_in_the_mean():
    items = [
        Graded(result("x"), 1.0),
        Graded(result(failure="timeout"), None, excluded="timeout"),
        Graded(result("x"), None, excluded="not_applicable"),
    ]
    metrics = rollout_metrics(items, 2.0)
    assert metrics["reward/mean"] == 1.0
    assert metrics["collect/excluded"] == 2
    assert metrics["excluded/timeout"] == metrics["excluded/not_applicable"] == 1


def test_what_takes_no_part_is_told_with_reasons_and_the_most_frequent_error():
    late = result(failure="timeout", error="stopped after 300 s")
    items = [Graded(result("x"), 1.0)] * 36 + [
        Graded(late, None, excluded="timeout"),
        Graded(late, None, excluded="timeout"),
        Graded(result(failure="infrastructure", error="lost"), None, excluded="infrastructure"),
        Graded(result("x"), None, excluded="not_applicable"),
    ]
    (note,) = failure_notes(items)
    assert (note.level, note.code) == ("info", "excluded")
    assert note.text == (
        "4 of 40 rollouts take no part: 2 timeout, 1 infrastructure, 1 not_applicable; "
        "2 × 'stopped after 300 s'"
    )
    (alarm,) = failure_notes(items[-5:])
    assert alarm.level == "warning"
    assert not list(failure_notes(items[:36]))


def test_an_agent_that_fails_often_is_told_with_its_error():
    failed = Graded(result(failure="agent", error="KeyError: 'x'"), 0.0, "failure")
    (note,) = failure_notes([failed, Graded(result("x"), 1.0)])
    assert note.text == "the agent failed in 1 of 2 rollouts; \"KeyError: 'x'\""


def test_a_run_none_of_whose_first_rollouts_came_to_an_end_is_stopped_with_the_reason():
    lost = Graded(result(failure="timeout", error="stopped after 1 s"), None, excluded="timeout")
    with pytest.raises(AgentError, match="none of 2 rollouts came to an end: 2 timeout; 2 × 'stop"):
        refuse_hopeless([lost, lost])
    refuse_hopeless([lost, Graded(result("2", calls=(chat_call(),)), 1.0)])


def test_calls_that_drifted_or_were_never_received_are_counted_by_their_kind():
    kinds = [None, "edited", "template", "edited", "tokenisation"]
    calls = tuple(replace(chat_call(), id=str(n), drift=kind) for n, kind in enumerate(kinds))
    calls += (replace(chat_call(), id="lost", superseded=True),)
    metrics = rollout_metrics(graded(lambda output: output == "2", result("2", calls=calls)), 1.0)
    assert metrics["collect/drifted_calls"] == 4
    assert metrics["collect/superseded_calls"] == 1
    assert [metrics[f"drift/{kind}"] for kind in ("edited", "template", "tokenisation")] == [
        2,
        1,
        1,
    ]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=50))
def test_intervals_hold_the_mean_and_stay_probabilities(values):
    mean, low, high = mean_interval(values)
    assert 0 <= low <= mean <= high <= 1


def test_a_run_folder_is_never_clobbered(tmp_path):
    path = tmp_path / "run"
    folder, resume = open_folder(str(path), "x", "fail")
    with folder:
        assert not resume
        folder.database.touch()
    with pytest.raises(ConfigError, match="exists already; --resume"):
        open_folder(str(path), "x", "fail")
    fresh, resume = open_folder(str(path), "x", "new")
    with fresh:
        assert (fresh.path, resume) == (tmp_path / "run-2", False)
    again, resume = open_folder(str(path), "x", "resume")
    with again:
        assert (again.path, resume) == (path, True)


def test_two_processes_cannot_own_one_run_folder(tmp_path):
    first, _ = open_folder(str(tmp_path / "run"), "x", "fail")
    with first:
        first.database.touch()
        with pytest.raises(ConfigError, match="in use by process"):
            open_folder(str(tmp_path / "run"), "x", "resume")
    second, _ = open_folder(str(tmp_path / "run"), "x", "resume")
    with second:
        assert second.path == first.path


def test_resuming_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"has no run\.db and no store\.url"):
        open_folder(str(tmp_path), "x", "resume")


def test_a_line_that_a_crash_has_cut_off_is_no_line(tmp_path):
    folder, _ = open_folder(str(tmp_path / "run"), "x", "fail")
    with folder:
        folder.append_metrics({"step": 1})
        folder.append_metrics({"step": 2})
        with folder.metrics.open("a") as file:
            file.write('{"step": 3, "cut o')
        assert folder.read_metrics() == [{"step": 1}, {"step": 2}]
        folder.write_metrics(folder.read_metrics()[1:])
        assert folder.metrics.read_text() == '{"step": 2}\n'


def test_pruning_keeps_whole_checkpoints_and_drops_drafts_that_a_crash_has_left(tmp_path):
    folder, _ = open_folder(str(tmp_path / "run"), "agent", "fail")
    with folder:
        for name in ("step-000020", "step-000025", "step-000050.new"):
            folder.checkpoints.joinpath(name).mkdir(parents=True)
        folder.prune_checkpoints(1)
        assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000025"]
