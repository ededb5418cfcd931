"""What credit makes of every framework's agents, those without spans included."""

from fulmen.credit.observe import Observed, observe


def test_calls_are_of_the_agents_that_made_them(ran):
    for result in ran.results.values():
        agents = [call.agent for call in observe(result).calls]
        if ran.case.traced:
            assert agents == list(ran.case.callers[: len(agents)])
        else:
            assert len(set(agents)) == 1


def test_every_tool_s_outcome_is_known(ran):
    for result in ran.sums:
        assert _outcomes(observe(result)) == [(tool, "ok") for tool in ran.case.tools]


def test_a_tool_that_raised_is_known_to_have_failed(ran):
    for result in ran.raising:
        (failed, *rest) = _outcomes(observe(result))
        assert failed == ("calculator", "error")
        assert {outcome for _, outcome in rest} <= {"ok"}


def test_a_tool_is_used_by_the_agent_whose_call_asked_for_it(ran):
    for result in ran.results.values():
        seen = observe(result)
        asking = [call for call in seen.calls if (call.response or {}).get("tool_calls")]
        use = next(use for use in seen.tools if use.name == "calculator")
        assert use.agent == next(
            call.agent for call in asking if "calculator" in str(call.response)
        )


def _outcomes(seen: Observed) -> list[tuple[str, str]]:
    return [(use.name, use.outcome) for use in seen.tools if not use.name.startswith("transfer_to")]
