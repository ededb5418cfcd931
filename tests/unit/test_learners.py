"""Several policies: whose calls reach which learner, and what a checkpoint holds of each."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Qwen3ForCausalLM

from attempts import call, result
from batches import credited
from fulmen.cli.main import cli
from fulmen.cli.options import load_settings
from fulmen.credit.selection import by_name
from fulmen.engine.adapters import AdapterConfig, add_adapter, load_adapter
from fulmen.launch.policy import PolicySource, check_same_policies, policy_sources
from fulmen.learner.learner import Learner
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.learner.weights import OneAdapter
from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Transition
from fulmen.schema.training import TrainConfig
from fulmen.trainer.crediting import Crediting, credit_step
from fulmen.trainer.folder import open_folder
from fulmen.trainer.grading import Graded
from fulmen.trainer.health import step_notes
from fulmen.trainer.learners import Learners, Trained
from models import tiny_model

NEEDED = {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"}
PLACES = {"base": ".", "writer": "policies/writer", "re*": "policies/re%2A"}


def trained(name: str, policy: Qwen3ForCausalLM | OneAdapter, **loss) -> Trained:
    learner = Learner(
        policy,
        objective=Objective(**loss),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
    )
    note = name.encode()
    return Trained(name, learner, lambda path: _write(path / "tokenizer", note), PLACES[name])


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def models() -> dict[str, Qwen3ForCausalLM]:
    return {name: tiny_model(seed=seed) for seed, name in enumerate(PLACES)}


def learners_of(policies, **loss) -> Learners:
    return Learners([trained(name, policy, **loss) for name, policy in policies.items()])


def loaded(folder: Path) -> Qwen3ForCausalLM:
    """In memory aligned as a new model's: on other boundaries sums differ in their last bit."""
    saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fresh = tiny_model(seed=9)
    fresh.load_state_dict(saved.state_dict())
    return fresh


def weights(policy: Qwen3ForCausalLM) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.parameters()])


ITEMS = [
    credited((1, 2), (3, 4), 1.0, "r", policy="writer"),
    credited((1, 2, 3, 4), (5,), 1.0, "r", policy="base"),
    credited((1, 2), (6, 7, 8), -1.0, "s", policy="writer"),
]


def test_each_learner_learns_from_its_own_policys_calls_as_if_it_were_alone():
    policies, alone = models(), models()
    before = {name: weights(policy) for name, policy in policies.items()}
    learners = learners_of(policies)
    metrics = learners.learn(ITEMS)
    for name in ("base", "writer"):
        own = [item for item in ITEMS if item.transition.policy == name]
        want = learners_of({name: alone[name]}).learn(own)
        assert torch.equal(weights(policies[name]), weights(alone[name]))
        assert metrics[f"learn/{name}/loss"] == want["learn/loss"]
        assert not torch.equal(weights(policies[name]), before[name])
    assert torch.equal(weights(policies["re*"]), before["re*"])
    assert learners.versions == {"base": 1, "writer": 1, "re*": 0}
    assert (metrics["learn/re*/updates"], metrics["learn/writer/sampled_tokens"]) == (0, 5)
    assert not any(name.count("/") == 1 for name in metrics)


def adapted(*names: str) -> Qwen3ForCausalLM:
    model = tiny_model()
    for seed, name in enumerate(names):
        add_adapter(model, AdapterConfig(rank=2, alpha=4, seed=seed), name)
    return model


def snapshot(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def own(state: dict[str, torch.Tensor], adapter: str) -> list[torch.Tensor]:
    return [value for name, value in state.items() if f".{adapter}." in name]


def test_learning_one_adapter_leaves_the_others_and_the_base_as_they_were():
    model, alone = adapted("a", "b"), adapted("a")
    before = snapshot(model)
    loss = {"kl_coefficient": 0.1}
    adapters = {"base": "a", "writer": "b"}
    both = Learners([trained(n, OneAdapter(model, a), **loss) for n, a in adapters.items()])
    metrics = both.learn(ITEMS[1:2])
    after = snapshot(model)
    assert [n for n in before if not torch.equal(before[n], after[n])] == [
        n for n in before if ".lora_B.a." in n
    ], "A has no gradient as long as B is zero"
    want = learners_of({"base": alone}, **loss).learn(ITEMS[1:2])
    assert metrics["learn/base/loss"] == want["learn/loss"]
    assert all(map(torch.equal, own(after, "a"), own(snapshot(alone), "a")))
    both.learn(ITEMS)
    assert metrics["learn/writer/updates"] == 0
    assert both.versions == {"base": 2, "writer": 1}
    third = both.learn(ITEMS)
    assert third["learn/base/kl_reference"] > 1e-6, "against the model without adapters"
    last = snapshot(model)
    assert all(torch.equal(last[n], before[n]) for n in before if ".lora_" not in n)
    assert not any(map(torch.equal, own(last, "b"), own(before, "b")))


def test_adapters_of_one_base_go_on_exactly_from_a_checkpoint_in_any_order(tmp_path):
    def learners(model: Qwen3ForCausalLM, adapters: dict[str, str]) -> Learners:
        return Learners([trained(n, OneAdapter(model, a)) for n, a in adapters.items()])

    model = adapted("a", "b")
    first = learners(model, {"base": "a", "writer": "b"})
    first.learn(ITEMS)
    first.save(tmp_path, final=False)
    twin = adapted("x", "y")
    load_adapter(twin, tmp_path, "y")
    load_adapter(twin, tmp_path / "policies" / "writer", "x")
    resumed = learners(twin, {"writer": "x", "base": "y"})
    resumed.load(tmp_path)
    ours, theirs = first.learn(ITEMS), resumed.learn(ITEMS)
    assert ours["learn/writer/loss"] == theirs["learn/writer/loss"]
    for one, other in (("a", "y"), ("b", "x")):
        assert all(map(torch.equal, own(snapshot(model), one), own(snapshot(twin), other)))


def test_the_metrics_of_a_single_policy_keep_their_names():
    learners = learners_of({"writer": tiny_model()})
    metrics = learners.learn([ITEMS[0]])
    assert {"learn/loss", "learn/updates"} <= set(metrics)
    assert not any("writer" in name for name in metrics)
    assert learners.versions == {"writer": 1}


def test_a_call_of_no_policy_is_an_error_before_any_weight_changes():
    policies = {"base": tiny_model()}
    before = weights(policies["base"])
    with pytest.raises(ValueError, match="is of policy 'writer'"):
        learners_of(policies).learn([ITEMS[1], ITEMS[0]])
    assert torch.equal(weights(policies["base"]), before)


def test_policies_of_one_name_or_one_place_are_refused():
    one = trained("writer", tiny_model())
    for wrong in ([], [one, one], [one, Trained("other", one.learner, one.save_model, one.place)]):
        with pytest.raises(ValueError, match="names and places of their own"):
            Learners(wrong)


class Scoring:
    """A learner that says one number of all tokens, and which calls it was asked about."""

    version, why = 0, ""

    def __init__(self, number: float) -> None:
        self.number = number
        self.asked: list[int] = []

    def values(self, transitions: Sequence[Transition]) -> list[list[float]]:
        self.asked.append(len(transitions))
        return [[self.number] * len(t.completion_ids) for t in transitions]

    def kl(self, transitions: Sequence[Transition]) -> list[list[float]]:
        return [[-number for number in numbers] for numbers in self.values(transitions)]


def test_numbers_of_tokens_come_from_each_calls_own_learner_in_the_order_asked():
    base, writer = Scoring(0.25), Scoring(1.0)
    named = {"base": base, "writer": writer}
    learners = Learners(
        [Trained(n, cast(Any, s), lambda _: None, PLACES[n]) for n, s in named.items()]
    )
    transitions = [item.transition for item in ITEMS]
    assert learners.values(transitions) == [[1.0, 1.0], [0.25], [1.0, 1.0, 1.0]]
    assert learners.kl(transitions[:1]) == [[-1.0, -1.0]]
    assert (base.asked, writer.asked) == ([1], [2, 1]), "a learner without calls is not asked"


def test_a_checkpoint_goes_on_exactly_with_every_policy(tmp_path):
    policies = models()
    learners = learners_of(policies)
    learners.learn(ITEMS)
    learners.learn(ITEMS[:1])
    learners.save(tmp_path)
    for name, place in PLACES.items():
        assert (tmp_path / place / "tokenizer").read_text() == name
    twins = {name: loaded(tmp_path / place) for name, place in PLACES.items()}
    resumed = learners_of(twins)
    resumed.load(tmp_path)
    assert resumed.versions == learners.versions == {"base": 1, "writer": 2, "re*": 0}
    ours, theirs = learners.learn(ITEMS), resumed.learn(ITEMS)
    assert ours["learn/writer/loss"] == theirs["learn/writer/loss"]
    for name in PLACES:
        assert torch.equal(weights(policies[name]), weights(twins[name]))


def test_flags_toml_and_python_name_the_same_policies_in_the_same_places():
    flags = make_config(TrainConfig, NEEDED | {"policies": ("writer=a/b=c", "check, re* = hub/id")})
    table = make_config(
        TrainConfig, NEEDED | {"policies": {"writer": "a/b=c", "check, re*": "hub/id"}}
    )
    assert flags == table
    assert policy_sources(flags) == [
        PolicySource("m", "m", (), "."),
        PolicySource("writer", "a/b=c", ("writer",), "policies/writer"),
        PolicySource("check, re*", "hub/id", ("check", "re*"), "policies/check%2C%20re%2A"),
    ]


@pytest.mark.parametrize(
    ("given", "policies", "origin"),
    [
        (("--seed=0",), {}, "default"),
        (("--policy=writer=a", "--policy", "re*=b"), {"writer": "a", "re*": "b"}, "flag"),
    ],
)
def test_the_flag_is_repeatable_and_a_runs_own_file_repeats_it(tmp_path, given, policies, origin):
    context = cli.commands["train"].make_context("train", list(given))
    flags = {name: context.params[name] for name in TrainConfig.model_fields} | NEEDED
    loaded = load_settings(TrainConfig, flags, None)
    assert (loaded.config.policies, loaded.origins["policies"]) == (policies, origin)
    with open_folder(str(tmp_path / "run"), "run", "fail")[0] as folder:
        folder.write_config(loaded.config, loaded.origins)
    none = cli.commands["train"].make_context("train", ["--seed=0"]).params
    file = str(tmp_path / "run" / "config.toml")
    again = load_settings(TrainConfig, {n: none[n] for n in TrainConfig.model_fields}, file)
    assert again.config == loaded.config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("writer",), "'writer' has no '='; write agents=model"),
        (("writer=a", "writer=b"), "'writer' is there twice"),
        (("=a",), "'' names no agent"),
        ({"..": "a"}, "'..' names no agent"),
        (("writer=",), "the policy of 'writer' has no model"),
    ],
)
def test_a_policy_that_says_nothing_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as caught:
        make_config(TrainConfig, NEEDED | {"policies": given})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_may_not_have_the_name_of_the_main_model():
    config = make_config(TrainConfig, NEEDED | {"model": "x/writer", "policies": {"writer": "a"}})
    with pytest.raises(ConfigError, match="'writer' has the name of the model of all other agents"):
        policy_sources(config)


def test_a_checkpoint_of_other_policies_is_refused_by_name(tmp_path):
    main, writer = PolicySource("m", "m"), PolicySource("re*", "a", ("re*",), "policies/re%2A")
    check_same_policies([main], tmp_path)
    with pytest.raises(ConfigError, match=r"has no policy 're\*': the run was begun without it"):
        check_same_policies([main, writer], tmp_path)
    (tmp_path / "policies" / "re%2A").mkdir(parents=True)
    check_same_policies([main, writer], tmp_path)
    with pytest.raises(ConfigError, match=r"has a policy 're\*', which the settings do not name"):
        check_same_policies([main], tmp_path)


def two_agents() -> list[Graded]:
    """A rollout that won and one that lost; the checker's model is not trained."""
    calls = (
        call(0, agent="writer", policy="writer"),
        call(1, agent="checker", policy="rules"),
        call(2, agent="rewriter", policy="base"),
    )
    return [Graded(result(*calls, name="won"), 1.0), Graded(result(calls[0], name="lost"), 0.0)]


def test_advantages_are_over_rollouts_whatever_policies_took_part():
    step = credit_step(two_agents(), Crediting(policies=["base", "writer"]))
    assert [(c.transition.policy, c.advantage) for c in step.credited] == [
        ("writer", 1.0),
        ("base", 1.0),
        ("writer", -1.0),
    ]
    assert step.metrics["dropped/other_model"] == 1
    assert step.notes == []


def test_of_several_policies_too_only_the_selected_agents_are_trained():
    how = Crediting(policies=["base", "writer"], selected=by_name(["rewriter"]))
    (item,) = credit_step(two_agents(), how).credited
    assert (item.transition.agent, item.transition.policy) == ("rewriter", "base")


def test_a_policy_that_nobody_used_is_a_warning_with_the_agents_that_were_there():
    how = Crediting(policies=["main", "writer", "wrtier"])
    (note,) = credit_step(two_agents(), how).notes
    assert note.code == "idle-policy"
    assert note.text.startswith(
        "no call of policy 'wrtier' in this step; agents seen: checker, rewriter, writer"
    )


def test_engine_and_learner_of_any_policy_that_disagree_are_a_warning():
    notes = step_notes({"learn/base/gap_mean": 0.01, "learn/writer/gap_mean": 0.2})
    assert [note.code for note in notes] == ["gap"]


def test_updates_that_were_not_made_are_counted_over_all_policies():
    (note,) = step_notes({"learn/base/skipped_updates": 1.0, "learn/writer/skipped_updates": 2.0})
    assert (note.code, note.text[:11]) == ("not-finite", "3 update(s)")


def test_updates_in_which_no_token_had_a_say_are_told():
    (note,) = step_notes({"learn/base/empty_updates": 1.0, "learn/writer/empty_updates": 1.0})
    assert (note.level, note.code) == ("warning", "empty")
    assert note.text.startswith("2 update(s) had a gradient of exactly 0")
    assert not list(step_notes({"learn/empty_updates": 0.0, "learn/updates": 1.0}))
