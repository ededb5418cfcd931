"""Algorithms by name, settings of the loss, and a learning test for each preset."""

from pathlib import Path

import pytest
import torch
from msgspec import structs

from bandits import GOOD, PROMPT, Bandit, Training, config, tiny_policy
from fulmen.launch.learning import _optimiser as optimiser_of
from fulmen.launch.objective import make_objective
from fulmen.learner.terms import PolicyLoss, Terms
from fulmen.schema.errors import ConfigError
from fulmen.schema.presets import PRESETS
from fulmen.schema.training import LOSSES


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


def test_warm_up_and_schedule_count_every_update_of_a_step():
    updates = {"updates_per_step": 4, "epochs": 2}
    made = optimiser_of(config(steps=10, warmup_steps=3, schedule="linear", **updates))
    assert (made.warmup_steps, made.total_steps) == (24, 80)


def test_a_loss_without_a_trust_region_does_not_see_rollouts_twice():
    with pytest.raises(ConfigError, match="epochs is 2, and loss 'reinforce' has nothing that"):
        config(algorithm="rloo", epochs=2)
    config(algorithm="rejection", epochs=2)


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


CASES = [(name, {}) for name in PRESETS]
CASES += [(name, {"critic": "shared"}) for name in ("ppo", "turn-ppo")]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_the_algorithm_learns_which_token_is_rewarded(name, changes):
    """Seeded; the chance of the good token is one in ten at first."""
    settings = config(algorithm=name, updates_per_step=2, **changes)
    bandit = Bandit(tiny_policy(), seed=0)
    before = float(bandit.chance()[GOOD])
    training = Training(settings, bandit.model)
    for _ in range(40):
        training.step(bandit.rollouts(training.learner.version))
    assert before < 0.2
    assert float(bandit.chance()[GOOD]) > 0.6


def test_kl_in_the_reward_pulls_back_to_the_reference():
    """Nothing is rewarded; the policy begins where it says one token four times in five."""
    bandit = Bandit(tiny_policy(), seed=0)
    reference = bandit.chance()
    training = Training(config(algorithm="reinforce++", kl_coefficient=1.0), bandit.model)
    ids = torch.tensor([PROMPT])
    while bandit.chance()[GOOD] < 0.8:
        (-bandit.model(input_ids=ids).logits[0, -1].log_softmax(-1)[GOOD]).backward()
        training.learner.optim_step()

    def divergence() -> float:
        chance = bandit.chance()
        return float((chance * (chance / reference).log()).sum())

    before = divergence()
    for _ in range(40):
        rollouts = bandit.rollouts(training.learner.version)
        training.step([structs.replace(one, reward=0.0) for one in rollouts])
    assert before > 1.0
    assert divergence() < 0.1
