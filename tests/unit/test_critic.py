"""PPO's critic, and the divergence for the reward, against whole-sequence forwards."""

import copy
from contextlib import nullcontext

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from transformers import Qwen3ForCausalLM

from batches import batch_of, credited
from fulmen.engine.model import load_model
from fulmen.launch.critic import make_critic
from fulmen.learner.critic import Critic, OwnCritic, SharedCritic
from fulmen.learner.learner import Learner
from fulmen.learner.logprobs import score
from fulmen.learner.losses import ValueLoss
from fulmen.learner.metrics import Tally
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError, DataError
from fulmen.schema.records import Credited
from fulmen.schema.training import TrainConfig
from models import tiny_model

KINDS = ["own", "shared"]


def valued(prompt, completion, *returns, advantage=0.0, rollout="r") -> Credited:
    call = credited(prompt, completion, advantage, rollout)
    return replace(call, returns=tuple(map(float, returns)))


BRANCHES = [
    valued((7, 7), (1, 2), 0.5, 0.5, rollout="a"),
    valued((1, 2, 3), (), rollout="b"),
    valued((1, 2, 3), (4, 5), 1, 2),
    valued((1, 2, 3, 4, 5, 6), (8, 9, 10), 3, 2, 1),
    valued((1, 2, 3), (4, 5), -1, 0, rollout="c"),
    valued((1, 2, 3), (4, 6), 0, 1, rollout="d"),
]
"""Apart, without a completion, a conversation, the same tokens again, and a branch."""


def say_something(critic: Critic) -> None:
    """A head that is not 0."""
    nn.init.normal_(critic.head.linear.weight, generator=torch.Generator().manual_seed(3))
    nn.init.constant_(critic.head.linear.bias, 0.25)


def make(
    kind: str,
    policy: Qwen3ForCausalLM,
    *,
    clip: float | None = 0.2,
    coefficient: float = 0.1,
    rate: float = 1e-2,
    **loss,
) -> tuple[Learner, Critic, nn.Module]:
    """A learner, its critic, and what this reads hidden states from."""
    optimiser = OptimiserConfig(learning_rate=rate)
    critic: Critic
    if kind == "own":
        critic = OwnCritic(tiny_model(seed=1), optimiser=optimiser, clip=clip)
        decoder = critic.decoder
    else:
        critic = SharedCritic(policy, coefficient=coefficient, clip=clip)
        decoder = policy.get_decoder()
    learner = Learner(
        policy,
        objective=Objective(**loss),
        optimiser=optimiser,
        updating=lambda _: nullcontext(),
        critic=critic,
    )
    return learner, critic, decoder


def plain_values(decoder, head, item: Credited) -> torch.Tensor:
    """(n,) by a forward pass over this call alone."""
    call = item.transition
    ids = torch.tensor([call.prompt_ids + call.completion_ids])
    hidden = decoder(input_ids=ids).last_hidden_state[0]
    return head(hidden)[len(call.prompt_ids) - 1 : -1]


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(before: list[torch.Tensor], module: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("layout", ["tree", "chain"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_a_plain_forward_before_each_token_call_by_call(kind, layout):
    learner, critic, decoder = make(kind, tiny_model(), micro_batch_tokens=9)
    learner.layout = layout
    if isinstance(critic, OwnCritic):
        critic.layout = layout
    say_something(critic)
    got = learner.values([item.transition for item in BRANCHES])
    with torch.no_grad():
        want = [plain_values(decoder, critic.head, item).tolist() for item in BRANCHES]
    assert [len(own) for own in got] == [2, 0, 2, 3, 2, 2]
    assert got[2] == got[5] != got[0], "a value does not know the token that comes"
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_that_has_learned_nothing_foresees_0(kind):
    learner, _, _ = make(kind, tiny_model())
    assert learner.values([BRANCHES[2].transition]) == [[0.0, 0.0]]


def test_a_family_that_makes_its_own_logits_has_values_all_the_same():
    model = tiny_model()
    learner, critic, decoder = make("shared", model)
    say_something(critic)
    model.config.mup_width_multiplier = 1.0
    batch = batch_of(BRANCHES)
    found = score(model, batch, head=critic.head)
    want = torch.cat([plain_values(decoder, critic.head, item) for item in batch.items])
    torch.testing.assert_close(found.values, want, rtol=1e-5, atol=1e-5)
    assert learner.values([BRANCHES[2].transition])[0] == pytest.approx(
        plain_values(decoder, critic.head, BRANCHES[2]).tolist(), abs=1e-5
    )


def test_the_gradient_of_a_shared_critic_is_that_of_its_loss_down_to_the_embedding():
    policy, witness = tiny_model(), tiny_model()
    learner, critic, _ = make("shared", policy, clip=None, coefficient=0.5)
    say_something(critic)
    head = copy.deepcopy(critic.head)
    lessons = [item for item in BRANCHES if item.returns]
    learner.forward_backward(lessons, [1 / 11] * 5, Tally())
    for item in lessons:
        error = plain_values(witness.get_decoder(), head, item) - torch.tensor(item.returns)
        (0.5 * error.square().sum() / 2 / 11).backward()
    pairs = [*zip(policy.parameters(), witness.parameters(), strict=True)]
    pairs += zip(critic.head.parameters(), head.parameters(), strict=True)
    for ours, theirs in pairs:
        assert ours.grad is not None
        assert ours.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_shared_critic_trains_the_policys_weights(kind):
    policy = tiny_model()
    learner, critic, decoder = make(kind, policy)
    say_something(critic)
    policy_before, decoder_before = parameters_of(policy), parameters_of(decoder)
    head_before = parameters_of(critic.head)
    metrics = learner.learn(BRANCHES)
    assert not same(decoder_before, decoder)
    assert not same(head_before, critic.head)
    assert same(policy_before, policy) == (kind == "own")
    assert learner.version == (0 if kind == "own" else 1), "advantages are 0"
    assert ("learn/critic_grad_norm" in metrics) == (kind == "own")


@pytest.mark.parametrize("kind", KINDS)
def test_returns_are_learned_and_what_is_explained_rises(kind):
    """What comes depends on the token said; before it, on the question."""
    items = [
        valued((1, 2), (5, 6), 0.5, 1.0, rollout="a"),
        valued((1, 2), (7, 6), 0.5, 0.0, rollout="b"),
        valued((3, 2), (5, 6), -1.0, -2.0, rollout="c"),
        valued((3, 2), (7, 6), -1.0, 0.0, rollout="d"),
    ]
    learner, _, _ = make(kind, tiny_model(), clip=None, coefficient=1.0)
    steps = [learner.learn(items) for _ in range(60)]
    explained = [step["learn/explained_variance"] for step in steps]
    assert explained[0] == 0.0
    assert explained[-1] > 0.95
    assert steps[-1]["learn/value_loss"] < 0.1 * steps[0]["learn/value_loss"]
    for item, values in zip(items, learner.values([i.transition for i in items]), strict=True):
        assert values == pytest.approx(list(item.returns), abs=0.3)


def test_a_critic_that_foresaw_everything_stays_as_it_is_whatever_it_learned_before():
    """Nothing was expected, and nothing came."""
    learner, critic, _ = make("own", tiny_model(), rate=0.0)
    assert isinstance(critic, OwnCritic)
    learner.learn([valued((1, 2), (3, 4), 1, 1)])
    assert critic.optimiser.steps_done == 1
    critic.optimiser.config = OptimiserConfig(learning_rate=1e-2)
    before = parameters_of(critic.decoder) + parameters_of(critic.head)
    metrics = learner.learn([valued((1, 2), (3, 4), 0, 0)])
    assert critic.optimiser.steps_done == 1
    assert "learn/critic_grad_norm" not in metrics
    assert same(before, nn.ModuleList([critic.decoder, critic.head]))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_held_near_those_from_before_the_step_not_the_update(kind):
    """Equal shares: the first update moves values beyond the clip, so the second has no more to
    gain from any token."""
    items = [valued((1, 2), (5, 6), 1, 1, rollout=name) for name in "ab"]
    learner, _, _ = make(kind, tiny_model(), clip=0.01, updates_per_step=2)
    metrics = learner.learn(items)
    assert metrics["learn/value_clip_fraction"] == 0.5
    learner, _, _ = make(kind, tiny_model(), clip=0.01, updates_per_step=2, epochs=2)
    assert learner.learn(items)["learn/value_clip_fraction"] == 0.75
    learner, _, _ = make(kind, tiny_model(), clip=0.01)
    assert learner.learn(items)["learn/value_clip_fraction"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_goes_on_exactly_where_it_was(kind, dtype, tmp_path):
    def loaded(seed: int) -> Qwen3ForCausalLM:
        # `to` would round what stays in float32 when a folder is loaded: positions.
        tiny_model(seed=seed).save_pretrained(tmp_path / f"base{seed}")
        return Qwen3ForCausalLM.from_pretrained(tmp_path / f"base{seed}", dtype=dtype).eval()

    def learner_on(policy: Qwen3ForCausalLM) -> tuple[Learner, Critic]:
        optimiser = OptimiserConfig(learning_rate=1e-2, warmup_steps=4)
        critic: Critic = SharedCritic(policy)
        if kind == "own":
            critic = OwnCritic(loaded(seed=1), optimiser=optimiser)
        return Learner(
            policy,
            objective=Objective(),
            optimiser=optimiser,
            updating=lambda _: nullcontext(),
            critic=critic,
        ), critic

    items = [*BRANCHES, valued((1, 2), (3, 4), 1, 2, advantage=1.0, rollout="e")]
    policy = loaded(seed=0)
    learner, critic = learner_on(policy)
    learner.learn(BRANCHES)  # the critic's own optimiser is a step ahead of the policy's
    learner.learn(items)
    learner.save(tmp_path)
    twin_policy = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    twin, twin_critic = learner_on(twin_policy)
    twin.load(tmp_path)
    calls = [item.transition for item in items]
    assert learner.values(calls) == twin.values(calls)
    ours, theirs = learner.learn(items), twin.learn(items)
    for name in ("loss", "value_loss", "explained_variance", "grad_norm", "learning_rate"):
        assert ours[f"learn/{name}"] == theirs[f"learn/{name}"], name
    assert same(parameters_of(policy), twin_policy)
    assert same(parameters_of(critic.head), twin_critic.head)
    assert learner.values(calls) == twin.values(calls)


def test_the_head_of_a_shared_critic_has_a_rate_of_its_own():
    """The first step of Adam is as long as the rate, for all but the smallest gradients."""
    policy = tiny_model()
    before, critic = parameters_of(policy), SharedCritic(policy, faster=20.0)
    learner = Learner(
        policy,
        objective=Objective(),
        optimiser=OptimiserConfig(learning_rate=1e-3),
        updating=lambda _: nullcontext(),
        critic=critic,
    )
    lesson = valued((1, 2), (3, 4), 1, 2, advantage=1.0)
    assert learner.learn([lesson])["learn/learning_rate"] == 1e-3
    pairs = zip(before, policy.parameters(), strict=True)
    moved = max((new.detach() - old).abs().max().item() for old, new in pairs)
    assert moved == pytest.approx(1e-3, rel=0.01)
    assert parameters_of(critic.head)[0].abs().max().item() == pytest.approx(0.02, rel=0.01)


def test_calls_credited_without_a_critic_are_refused():
    learner, _, _ = make("own", tiny_model())
    with pytest.raises(DataError, match="call r-2-3 has 1 tokens and 0 returns for the critic"):
        learner.learn([credited((1, 2), (3,), 1.0)])


def test_explained_variance_is_over_all_tokens_and_absent_where_nothing_varies():
    def told(*pairs: tuple[float, float]) -> dict[str, float]:
        tally = Tally()
        for value, target in pairs:
            loss = ValueLoss(torch.zeros(1), torch.zeros(1, dtype=torch.bool))
            tally.add_values(loss, torch.tensor([value]), torch.tensor([target]))
        return tally.metrics(sampled_tokens=0, transition_tokens=0, seconds=0.0)

    some = told((1.0, 0.0), (2.0, 4.0), (2.0, 2.0))  # errors −1, 2, 0
    assert some["learn/explained_variance"] == pytest.approx(1 - (5 / 3 - 1 / 9) / (8 / 3))
    assert told((9.0, 0.0), (11.0, 2.0))["learn/explained_variance"] == 1.0, "but for a constant"
    assert "learn/explained_variance" not in told((1.0, 0.3), (2.0, 0.3), (4.0, 0.3))
    assert not any("return" in name or "surprise" in name for name in some)


def test_the_settings_give_the_critic_they_ask_for(calc):
    def critic(**changes) -> Critic | None:
        needed = {"agent": "a.py:f", "tasks": "t.jsonl", "model": f"{calc}/base"}
        settings = make_config(TrainConfig, needed | {"learning_rate": 0.5} | changes)
        optimiser = OptimiserConfig(learning_rate=0.5, warmup_steps=7)
        return make_critic(settings, policy, optimiser, base=f"{calc}/base")

    policy = load_model(calc / "base")
    assert critic() is None
    for changes, times in (({}, 10.0), ({"critic_learning_rate": 0.25}, 0.5)):
        shared = critic(algorithm="ppo", critic="shared", **changes)
        assert isinstance(shared, SharedCritic)
        assert shared.faster == times
    for changes, rate in (({}, 5.0), ({"critic_learning_rate": 0.25}, 0.25)):
        own = critic(algorithm="ppo", **changes)
        assert isinstance(own, OwnCritic)
        assert own.optimiser.config == OptimiserConfig(learning_rate=rate, warmup_steps=7)
        assert own.decoder is not policy.model.get_decoder()
        assert same(parameters_of(policy.model.get_decoder()), own.decoder)


def test_a_critic_of_another_vocabulary_is_refused(calc, tmp_path):
    policy = load_model(calc / "base")
    other = load_model(calc / "base")
    other.tokenizer.add_tokens(["<a token of its own>"])
    other.model.save_pretrained(tmp_path)
    other.tokenizer.save_pretrained(tmp_path)
    needed = {"agent": "a.py:f", "tasks": "t.jsonl", "model": f"{calc}/base"}
    settings = make_config(
        TrainConfig, needed | {"algorithm": "ppo", "critic_model": str(tmp_path)}
    )
    with pytest.raises(ConfigError, match="has another vocabulary than the policy"):
        make_critic(settings, policy, OptimiserConfig(learning_rate=0.5), base=f"{calc}/base")


def drifted(reference: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    policy = copy.deepcopy(reference)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def test_kl_for_the_reward_is_the_difference_of_log_probabilities_token_by_token():
    reference = tiny_model()
    policy = drifted(reference)
    learner = Learner(
        policy,
        objective=Objective(kl_in_reward=True),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
        reference=tiny_model(),
    )
    learner.layout = "tree"
    got = learner.kl([item.transition for item in BRANCHES])

    def table(model, call):
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        return torch.log_softmax(model(input_ids=ids).logits[0], -1)

    for item, own in zip(BRANCHES, got, strict=True):
        call, start = item.transition, len(item.transition.prompt_ids) - 1
        delta = table(policy, call) - table(reference, call)
        want = [delta[start + n, token].item() for n, token in enumerate(call.completion_ids)]
        assert own == pytest.approx(want, abs=1e-4)
    assert max(abs(number) for own in got for number in own) > 0.01


def test_a_reference_for_the_reward_is_frozen_and_no_term_of_the_loss():
    policy = tiny_model()
    learner = Learner(
        policy,
        objective=Objective(kl_in_reward=True),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
    )
    call = credited((1, 2), (3, 4))
    assert learner.kl([call.transition]) == [[0.0, 0.0]]
    assert learner.learn([credited((1, 2), (3, 4), 0.0)])["learn/updates"] == 0
    for _ in range(3):
        assert "learn/kl_reference" not in learner.learn([call])
    assert min(learner.kl([call.transition])[0]) > 0.1, "the token is likelier than it was"


def test_without_a_critic_or_a_reference_there_is_nothing_to_ask():
    learner = Learner(
        tiny_model(),
        objective=Objective(),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
    )
    with pytest.raises(ConfigError, match="no critic"):
        learner.values([])
    with pytest.raises(ConfigError, match="no reference"):
        learner.kl([])
