"""What the gateway records of every framework's agents, with nothing but environment variables."""

from frameworks.rollouts import RAISING, SUMS
from fulmen.schema.records import Call


def test_every_agent_comes_to_its_end(ran):
    for expression, result in ran.results.items():
        failed = expression in RAISING and ran.case.aborts
        assert result.outcome.failure == ("agent" if failed else None), result.outcome
        if failed:
            assert "ZeroDivisionError" in result.outcome.error
        else:
            assert result.outcome.output == f"{expression} is done"


def test_every_call_is_recorded_under_the_rollout_whose_task_it_is_about(ran, tokenizer):
    for expression, result in ran.results.items():
        for call in result.calls:
            text = tokenizer.decode(call.prompt_ids)
            asked = [other for other in SUMS + RAISING if f"What is {other}?" in text]
            assert asked == [expression]


def test_each_rollout_has_the_calls_it_made_and_no_others(ran):
    case = ran.case
    for result in ran.sums:
        assert _asked(result.calls) == ([case.protocol] * len(case.callers))
    for result in ran.raising:
        made = 1 if case.aborts else len(case.callers)
        assert _asked(result.calls) == [case.protocol] * made


def test_conversations_go_on_from_the_sampled_tokens(ran):
    for result in ran.sums:
        first, second, *_ = result.calls
        assert second.parent == (first.id if ran.case.continues else None)


def _asked(calls: tuple[Call, ...]) -> list[str]:
    return [call.protocol for call in calls]
