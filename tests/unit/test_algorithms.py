"""Algorithms by name, settings of the loss, and a learning test for each preset."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from msgspec import structs
from transformers import Qwen3Config, Qwen3ForCausalLM

from fulmen.launch.crediting import make_crediting, make_scorers
from fulmen.launch.objective import make_objective
from fulmen.learner.critic import Critic, OwnCritic, SharedCritic
from fulmen.learner.learner import Learner
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.learner.terms import PolicyLoss, Terms
from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError
from fulmen.schema.presets import PRESETS
from fulmen.schema.records import Trajectory, Transition
from fulmen.schema.training import CRITIC_ADVANTAGES, LOSSES, TrainConfig
from fulmen.trainer.crediting import credit_trajectories
from fulmen.trainer.learners import Learners, Trained
from fulmen.trainer.weights import UNWEIGHTED

NEEDED = {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"}
PROMPT = (1, 2, 3)
GOOD = 7
"""The token that is rewarded."""


def config(**changes) -> TrainConfig:
    return make_config(TrainConfig, NEEDED | changes)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_made_of_settings_that_there_are(name):
    made = config(algorithm=name)
    for key, value in PRESETS[name].items():
        assert getattr(made, key) == value


def test_what_is_set_beside_an_algorithm_wins():
    made = config(algorithm="dapo", clip_high=0.5)
    assert (made.clip_low, made.clip_high, made.dynamic_sampling) == (0.2, 0.5, True)


def test_an_unknown_algorithm_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="there is no algorithm 'gropo'; known: grpo, dr-grpo"):
        config(algorithm="gropo")


def test_an_unknown_loss_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'clip'\?; or file.py:function"):
        config(loss="clipp")


def test_a_correction_needs_the_learners_own_probabilities():
    with pytest.raises(ConfigError, match="set old_logprobs to 'learner'"):
        config(correction="truncate")
    config(correction="truncate", old_logprobs="learner")


def test_a_loss_of_the_users_own_is_used(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from fulmen.learner.terms import PolicyLoss\n"
        "def double(terms):\n"
        "    loss = -2 * terms.advantages * terms.logprobs\n"
        "    return PolicyLoss(loss, (terms.logprobs - terms.old).exp().detach(), loss != loss)\n"
    )
    loss = make_objective(config(loss=f"{tmp_path}/mine.py:double")).loss
    one = torch.tensor([-1.0])
    terms = Terms(one, one, one, torch.tensor([3.0]), torch.tensor([0]))
    given = loss(terms)
    assert isinstance(given, PolicyLoss)
    assert given.loss.tolist() == [6.0]


def test_only_a_loss_of_your_own_is_shown_what_has_no_advantage(tmp_path):
    source = "from fulmen.learner.losses import reinforce\n"
    tmp_path.joinpath("mine.py").write_text(source)
    own = make_objective(config(loss=f"{tmp_path}/mine.py:reinforce"))
    assert own.every_call
    assert not any(make_objective(config(loss=name)).every_call for name in LOSSES)


class Bandit:
    """One question, one token as the answer, a reward for one of the tokens."""

    def __init__(self, model: Qwen3ForCausalLM, seed: int) -> None:
        self.model, self.generator = model, torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def chance(self) -> torch.Tensor:
        """(V,) of each token."""
        return self.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].softmax(-1)

    def rollouts(self, version: int) -> list[Trajectory]:
        """Four groups of eight, each answer two tokens of which the first counts."""
        chance = self.chance()
        found = []
        for number in range(32):
            first = int(torch.multinomial(chance, 1, generator=self.generator))
            transition = Transition(
                rollout_id=str(number),
                call_id=str(number),
                agent="agent",
                prompt_ids=PROMPT,
                completion_ids=(first,),
                logprobs=(float(chance[first].log()),),
                temperature=1.0,
                version=version,
                state="start",
            )
            reward = 1.0 if first == GOOD else 0.0
            found.append(
                Trajectory(
                    rollout_id=str(number),
                    group=str(number // 8),
                    transitions=(transition,),
                    reward=reward,
                )
            )
        return found


def bandit_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    return Qwen3ForCausalLM(shape).eval()


def critic_of(settings: TrainConfig, policy: Qwen3ForCausalLM) -> Critic | None:
    if settings.advantage not in CRITIC_ADVANTAGES:
        return None
    if settings.critic == "shared":
        return SharedCritic(policy, coefficient=settings.value_coefficient)
    return OwnCritic(bandit_model(), optimiser=OptimiserConfig(learning_rate=0.01))


CASES = [(name, {}) for name in PRESETS]
CASES += [(name, {"critic": "shared"}) for name in ("ppo", "turn-ppo")]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_the_algorithm_learns_which_token_is_rewarded(name, changes):
    """Seeded; the chance of the good token is one in ten at first."""
    settings = config(algorithm=name, group_size=8, tasks_per_step=4, **changes)
    bandit = Bandit(bandit_model(), seed=0)
    before = float(bandit.chance()[GOOD])
    learner = Learner(
        bandit.model,
        objective=make_objective(settings),
        optimiser=OptimiserConfig(learning_rate=0.01),
        updating=lambda _: nullcontext(),
        critic=critic_of(settings, bandit.model),
    )
    crediting = make_crediting(settings, (), UNWEIGHTED)
    policy = Trained("", learner, lambda _: None)
    scorers = make_scorers(settings, Learners([policy]))
    for _ in range(40):
        learner.learn(credit_trajectories(bandit.rollouts(learner.version), crediting, scorers))
    assert before < 0.2
    assert float(bandit.chance()[GOOD]) > 0.6


def test_kl_in_the_reward_pulls_back_to_the_reference():
    """Nothing is rewarded; the policy begins where it says one token four times in five."""
    settings = config(algorithm="reinforce++", kl_coefficient=1.0)
    bandit = Bandit(bandit_model(), seed=0)
    reference = bandit.chance()
    learner = Learner(
        bandit.model,
        objective=make_objective(settings),
        optimiser=OptimiserConfig(learning_rate=0.01),
        updating=lambda _: nullcontext(),
    )
    ids = torch.tensor([PROMPT])
    while bandit.chance()[GOOD] < 0.8:
        (-bandit.model(input_ids=ids).logits[0, -1].log_softmax(-1)[GOOD]).backward()
        learner.optim_step()

    def divergence() -> float:
        chance = bandit.chance()
        return float((chance * (chance / reference).log()).sum())

    crediting, scorers = (
        make_crediting(settings, (), UNWEIGHTED),
        make_scorers(settings, Learners([Trained("", learner, lambda _: None)])),
    )
    before = divergence()
    for _ in range(40):
        rollouts = [structs.replace(one, reward=0.0) for one in bandit.rollouts(learner.version)]
        learner.learn(credit_trajectories(rollouts, crediting, scorers))
    assert before > 1.0
    assert divergence() < 0.1
