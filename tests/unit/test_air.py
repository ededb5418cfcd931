"""Automatic intermediate rewarding: what earns a reward, how much, and who."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attempts import asks, call, refused, says
from fulmen.credit.air import apply_rules
from fulmen.credit.observe import Observed
from fulmen.credit.rules import Rule
from fulmen.credit.schemas import fits
from fulmen.launch.air import load_predicates, read_rules
from fulmen.launch.api import _plain
from fulmen.schema.errors import AgentError, ConfigError, GraderError
from fulmen.schema.records import ToolUse

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "op": {"enum": ["+", "-"]}},
    "required": ["a"],
    "additionalProperties": False,
}
OFFER = {"tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]}


def use(call_id: str | None = "c0", name="add", arguments='{"a": 1}', **changes) -> ToolUse:
    return ToolUse(name=name, arguments=arguments, call_id=call_id, agent="solver", **changes)


def seen(*tools, calls=()) -> Observed:
    calls = calls or (call(0, agent="solver", request=OFFER, response=asks()),)
    return Observed("r", 1, tuple(calls), tools)


def earned(rule: Rule, observed: Observed, predicate=None) -> dict[str | None, float]:
    """Call to reward; None is the whole rollout."""
    predicates = {rule.function or "": predicate} if predicate else {}
    return {r.call_id: r.value for r in apply_rules([rule], observed, predicates)}


def rule(when, **changes) -> Rule:
    return Rule.model_validate({"when": when, "weight": 1.0} | changes)


@pytest.mark.parametrize(
    ("when", "hits"),
    [
        ("tool_ok", {"ok": 1.0}),
        ("tool_failed", {"error": 1.0}),
        ("tool_timeout", {"timeout": 1.0}),
    ],
)
def test_an_outcome_earns_its_own_reward_and_unknown_earns_none(when, hits):
    outcomes = ("ok", "error", "timeout", "unknown")
    tools = [use(name, outcome=name) for name in outcomes]
    assert earned(rule(when), seen(*tools)) == hits


def test_arguments_that_are_no_json_are_told_from_those_that_are():
    tools = [
        use("good"),
        use("none", arguments=""),
        use("bad", arguments="{'a': 1}"),
        use("nan", arguments="NaN"),
    ]
    calls = [call(n, id=t.call_id) for n, t in enumerate(tools)]
    assert earned(rule("json_invalid"), seen(*tools, calls=calls)) == {"bad": 1.0, "nan": 1.0}
    assert earned(rule("json_valid"), seen(*tools, calls=calls)) == {"good": 1.0, "none": 1.0}


def test_answers_are_read_as_json_only_where_they_are_text():
    calls = [
        call(0, response=says('{"answer": 4}')),
        call(1, response=says("four")),
        call(2, response=asks(("i", "add", "{}"))),
        call(3, response=says("four"), superseded=True),
        call(4, response={"choices": [{"message": {"content": "[1]"}}]}),
    ]
    assert earned(rule("json_invalid", of="answer"), seen(calls=calls)) == {"c1": 1.0}
    assert earned(rule("json_valid", of="answer"), seen(calls=calls)) == {"c0": 1.0, "c4": 1.0}


def test_arguments_are_held_against_the_schema_in_the_request():
    tools = [
        use("fits"),
        use("kind", arguments='{"a": "1"}'),
        use("lacks", arguments="{}"),
        use("more", arguments='{"a": 1, "b": 2}'),
        use("broken", arguments="{"),
        use("unknown", name="other", arguments='{"a": "1"}'),
    ]
    calls = [call(n, id=t.call_id, request=OFFER) for n, t in enumerate(tools)]
    hits = earned(rule("schema_invalid"), seen(*tools, calls=calls))
    assert hits == {"kind": 1.0, "lacks": 1.0, "more": 1.0}


@pytest.mark.parametrize(
    ("value", "schema", "fit"),
    [
        (1.0, {"type": "integer"}, True),
        (True, {"type": "integer"}, False),
        (True, {"type": "number"}, False),
        (None, {"type": ["string", "null"]}, True),
        ([1, "x"], {"items": {"type": "integer"}}, False),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, False),
        ({"p": {"n": "x"}}, {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {
            "P": {"properties": {"n": {"type": "integer"}}}}}, False),
        ("x", {"$ref": "#"}, True),
        ("x", {"const": "y"}, False),
        ({"a": 1}, {"properties": "?", "required": 3, "enum": 4, "anyOf": 5, "type": 6}, True),
        ("x", False, False),
        ("x", {"type": "word"}, True),
    ],
)  # fmt: skip
def test_schemas_of_tools_are_checked_and_what_is_not_understood_forbids_nothing(
    value, schema, fit
):
    assert fits(value, schema) is fit


def test_the_same_tool_with_the_same_arguments_again_is_a_repetition():
    tools = [
        use("c0", arguments='{"a": 1, "b": 2}'),
        use("c1", arguments='{"b":2,"a":1}'),
        use("c2", arguments='{"a": 2}'),
        use("c3", name="other", arguments='{"a": 1, "b": 2}'),
        use("c4", arguments='{"a": 1, "b": 2}'),
    ]
    assert earned(rule("repeated_call"), seen(*tools)) == {"c1": 1.0, "c4": 1.0}


def test_results_without_content_are_empty_and_unknown_ones_are_not():
    results = {"blank": " \n", "list": "[]", "null": "null", "zero": "0", "none": None}
    tools = [use(name, result=text) for name, text in results.items()]
    assert set(earned(rule("empty_result"), seen(*tools))) == {"blank", "list", "null"}


def test_an_answer_cut_at_its_limit_is_truncated():
    calls = [call(0, finish_reason="length"), call(1), call(2, finish_reason="length")]
    assert set(earned(rule("truncated"), seen(calls=calls))) == {"c0", "c2"}


def test_a_refusal_for_length_is_known_in_the_words_of_both_providers():
    calls = [
        refused(0, 400, {"code": "context_length_exceeded", "message": "…"}, agent="one"),
        refused(1, 400, {"message": "prompt is too long: 9 tokens"}, agent="two"),
        refused(2, 400, {"code": "invalid", "message": "n must be 1"}, agent="three"),
    ]
    rewards = apply_rules([rule("context_overflow")], seen(calls=calls))
    assert [(r.agent, r.call_id, r.value) for r in rewards] == [
        ("one", None, 1.0),
        ("two", None, 1.0),
    ]


def test_a_status_is_met_exactly_or_from_a_lowest_one_on():
    calls = [refused(n, status, {}, agent=f"a{status}") for n, status in enumerate((400, 429, 500))]
    for parameters, agents in (
        ({"status": 429}, ["a429"]),
        ({"min_status": 429}, ["a429", "a500"]),
    ):
        rewards = apply_rules([rule("http_status", **parameters)], seen(calls=calls))
        assert [r.agent for r in rewards] == agents


def test_calls_are_slow_by_their_latency_and_tools_by_their_time():
    calls = [call(0, started=0.0, ended=3.0), call(1, started=0.0, ended=1.0)]
    assert earned(rule("slow", seconds=2), seen(calls=calls)) == {"c0": 1.0}
    tools = [
        use("c0", started=0.0, ended=5.0),
        use("c1", started=0.0, ended=1.0),
        use("c1", started=0.0, ended=None),
    ]
    assert earned(rule("slow", seconds=2, tool="a*"), seen(*tools)) == {"c0": 1.0}


def test_a_users_function_decides_by_call_and_tools_and_may_give_a_number():
    calls = call(0, agent="solver"), call(1, agent="solver")

    def busy(one, tools):
        return len(tools) / 2 if one.id == "c0" else False

    given_rule = rule("predicate", function="f.py:busy", weight=-0.5)
    assert earned(given_rule, seen(use(), use(), use(), calls=calls), busy) == {"c0": -0.75}


@pytest.mark.parametrize("bad", [None, "yes", float("nan"), [1]])
def test_a_users_function_that_gives_no_number_is_named(bad):
    rules = rule("predicate", function="f.py:check", name="mine")
    with pytest.raises(GraderError, match=r"rule 'mine': f\.py:check returned .* on call c0"):
        earned(rules, seen(), lambda *_: bad)


def test_a_users_function_that_raises_is_named_with_the_reason():
    with pytest.raises(GraderError, match=r"f\.py:check raised ZeroDivisionError"):
        earned(rule("predicate", function="f.py:check"), seen(), lambda *_: 1 / 0)


def test_a_reward_goes_to_the_call_the_agent_or_the_rollout():
    tools = use(outcome="error"), use("c1", outcome="error")
    rewards = [
        [(r.call_id, r.agent, r.value) for r in apply_rules([r], seen(*tools))]
        for r in (rule("tool_failed", target=target) for target in ("call", "agent", "rollout"))
    ]
    assert rewards == [
        [("c0", None, 1.0), ("c1", None, 1.0)],
        [(None, "solver", 2.0)],
        [(None, None, 2.0)],
    ]


def test_a_tool_that_no_call_asked_for_earns_no_call_anything():
    alone = use(None, outcome="error")
    assert apply_rules([rule("tool_failed")], seen(alone)) == []
    (reward,) = apply_rules([rule("tool_failed", target="agent")], seen(alone))
    assert (reward.agent, reward.value) == ("solver", 1.0)


def test_patterns_narrow_a_rule_to_tools_and_agents():
    tools = use("c0", "sql_run", outcome="ok"), use("c1", "add", outcome="ok")
    assert earned(rule("tool_ok", tool="sql_*"), seen(*tools)) == {"c0": 1.0}
    assert earned(rule("tool_ok", agent="sol?er"), seen(*tools)) == {"c0": 1.0, "c1": 1.0}
    assert earned(rule("tool_ok", agent="other"), seen(*tools)) == {}


def test_rewards_say_that_a_rule_gave_them_and_which():
    (reward,) = apply_rules([rule("tool_ok", name="worked")], seen(use(outcome="ok")))
    assert (reward.name, reward.source, reward.rollout_id, reward.attempt) == (
        "worked", "rule", "r", 1,
    )  # fmt: skip


uses_of_calls = st.lists(
    st.tuples(st.sampled_from(["c0", "c1", "c2"]), st.floats(-2, 2)), max_size=20
)


@given(uses_of_calls, st.floats(-3, 3), st.floats(0.01, 5))
def test_a_rules_rewards_of_a_rollout_keep_to_its_cap_and_to_their_proportions(hits, weight, cap):
    calls = [call(n, id=f"{name}-{n}") for n, (name, _) in enumerate(hits)]
    strengths = {one.id: size for one, (_, size) in zip(calls, hits, strict=True)}

    def strength(one, tools):
        return strengths[one.id]

    capped, free = (
        apply_rules(
            [rule("predicate", function="f", weight=weight, cap=limit)],
            Observed("r", 1, tuple(calls)),
            {"f": strength},
        )
        for limit in (cap, None)
    )
    total = sum(r.value for r in capped)
    assert abs(total) <= cap + 1e-9
    wanted = sum(r.value for r in free)
    shrunk = min(1.0, cap / abs(wanted)) if wanted else 1.0
    assert [r.value for r in capped] == pytest.approx([r.value * shrunk for r in free], abs=1e-9)


def rules_file(tmp_path, text) -> str:
    file = tmp_path / "air.toml"
    file.write_text(text)
    return str(file)


def test_rules_are_read_from_a_toml_file(tmp_path):
    file = rules_file(
        tmp_path,
        '[[rule]]\nwhen = "tool_failed"\nweight = -0.2\ncap = 0.4\n'
        '[[rule]]\nwhen = "slow"\nseconds = 3\nweight = -1\ntarget = "rollout"\nname = "late"\n',
    )
    first, second = read_rules(file)
    assert first == Rule(when="tool_failed", weight=-0.2, cap=0.4)
    assert (second.reward_name, second.earner, second.seconds) == ("late", "rollout", 3.0)
    assert read_rules(None) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rule; write"),
        ("rule = 3", "holds no rule; write"),
        ("rule = [3]", "rule 1 must be a table"),
        ("[[rules]]\n", "there is no 'rules'"),
        ("[[rule]", "not valid TOML"),
        ("[[rule]]\nweight = 1", "rule 1: when is missing; write when = …"),
        ('[[rule]]\nwhen = "tool_ok"\nwait = 1', "rule 1: there is no setting 'wait'"),
        ('[[rule]]\nwhen = "tool_fail"\nweight = 1', "rule 1: when is 'tool_fail'"),
        ('[[rule]]\nwhen = "tool_ok"\nweight = nan', "rule 1: weight is nan"),
        ('[[rule]]\nwhen = "tool_ok"\nweight = 1\ncap = 0', "rule 1: cap is 0"),
        ('[[rule]]\nwhen = "slow"\nweight = 1', "rule 1: slow needs seconds"),
        ('[[rule]]\nwhen = "predicate"\nweight = 1', "rule 1: predicate needs function"),
        ('[[rule]]\nwhen = "http_status"\nweight = 1', "rule 1: http_status needs either"),
        ('[[rule]]\nwhen = "truncated"\nweight = 1\ntool = "a"', "rule 1: tool does not go with"),
        ('[[rule]]\nwhen = "tool_ok"\nweight = 1\nseconds = 1', "rule 1: seconds does not go with"),
        (
            '[[rule]]\nwhen = "context_overflow"\nweight = 1\ntarget = "call"',
            "rule 1: a refused request has no call to train",
        ),
        ('[[rule]]\nwhen = "tool_ok"\nweight = 1\n' * 2, "rules 1 and 2 are both called 'tool_ok'"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said_in_one_line_with_file_and_number(
    tmp_path, text, message
):
    with pytest.raises(ConfigError) as caught:
        read_rules(rules_file(tmp_path, text))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "air.toml"))
    assert "\n" not in str(caught.value)


def test_a_file_of_rules_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"gone\.toml: no such file; check --air"):
        read_rules("gone.toml")


def test_rules_may_be_given_in_python():
    rules = [Rule(when="tool_failed", weight=-0.2, tool="add"), Rule(when="tool_ok", weight=0.1)]
    settings = _plain({"air": rules, "train": ["writer", "checker"]})
    assert list(read_rules(settings["air"])) == rules
    written = json.loads(Path(settings["air"]).read_text())
    assert written["rule"][1] == {"when": "tool_ok", "weight": 0.1}
    assert settings["train"] == "writer,checker"
    assert _plain({"air": "air.toml"}) == {"air": "air.toml"}


def test_the_functions_of_rules_are_imported_before_anything_runs(tmp_path):
    file = tmp_path / "air_checks.py"
    file.write_text("def long(call, tools):\n    return len(tools) > 2\n")
    good = Rule(when="predicate", weight=1, function=f"{file}:long")
    assert load_predicates([good])[good.function or ""](call(0), [use()] * 3) is True
    with pytest.raises(AgentError, match=r"rule 'predicate'.*did you mean 'long'"):
        load_predicates([Rule(when="predicate", weight=1, function=f"{file}:lon")])
