"""What credit makes of every framework's agents, those without spans included."""

from fulmen.credit.observe import Observed, observe


def test_calls_are_of_the_agents_that_made_them(ran):
    for result in ran.results.values():
        agents = [call.agent for call in observe(result).calls]
        if ran.case.traced:
            assert agents == list(ran.case.callers[: len(agents)])
        else:
            assert len(set(agents)) == 1


def test_every_tool_s_outcome_is_known_where_somebody_told_it(ran):
    # Of OpenAI's protocols, only a failure's words say how a tool ended.
    told = "ok" if ran.case.traced or ran.case.protocol == "messages" else "unknown"
    for result in ran.sums:
        assert _outcomes(observe(result)) == [(tool, told) for tool in ran.case.tools]


def test_a_tool_that_raised_is_known_to_have_failed(ran):
    for result in ran.raising:
        (failed, *rest) = _outcomes(observe(result))
        assert failed == ("calculator", "error")
        assert {outcome for _, outcome in rest} <= {"ok"}


def test_a_tool_is_used_by_the_agent_that_was_at_work(ran):
    for result in ran.results.values():
        seen = observe(result)
        use = next(use for use in seen.tools if use.name == "calculator")
        assert use.agent == (ran.case.user or seen.calls[0].agent)


def _outcomes(seen: Observed) -> list[tuple[str, str]]:
    return [(use.name, use.outcome) for use in seen.tools if not use.name.startswith("transfer_to")]
