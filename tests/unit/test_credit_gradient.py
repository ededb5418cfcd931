"""What a call's own reward does to the gradient, on a tiny random model."""

from contextlib import nullcontext

import pytest
import torch
from msgspec.structs import replace
from transformers import Qwen3ForCausalLM

from batches import batch_of
from fulmen.credit.advantage import credit
from fulmen.credit.assign import discounted, identical, last, per_agent, reward_to_go
from fulmen.learner.learner import Learner
from fulmen.learner.logprobs import score
from fulmen.learner.metrics import Tally
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.schema.records import Credited, Trajectory, Transition
from models import tiny_model


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return tiny_model()


def turn(model, agent: str, prompt, completion, *, rollout="won", reward=0.0) -> Transition:
    """A call whose log-probabilities are the model's own, so that nothing is clipped."""
    transition = Transition(
        rollout_id=rollout,
        call_id=f"{rollout}{len(prompt)}",
        agent=agent,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=(0.0,) * len(completion),
        temperature=1.0,
        version=0,
        reward=reward,
    )
    with torch.no_grad():
        item = Credited(transition=transition, advantage=1.0)
        own = score(model, batch_of([item], layout="chain")).logprobs
    return replace(transition, logprobs=tuple(own.tolist()))


def group(model, middle_reward: float) -> list[Trajectory]:
    """A rollout of three calls of two agents, the middle one with a reward; and one that lost."""
    won = (
        turn(model, "writer", (1, 2), (3, 4)),
        turn(model, "checker", (1, 2, 3, 4, 5), (6, 7), reward=middle_reward),
        turn(model, "writer", (1, 2, 3, 4, 5, 6, 7, 8), (9,)),
    )
    lost = (turn(model, "writer", (1, 2), (9, 9), rollout="lost"),)
    return [
        Trajectory(rollout_id="won", group="g", transitions=won, reward=1.0),
        Trajectory(rollout_id="lost", group="g", transitions=lost, reward=0.0),
    ]


def contribution(model, item: Credited) -> torch.Tensor:
    """The gradient that one call alone adds to the step's."""
    model.zero_grad()
    learner = Learner(
        model,
        objective=Objective(),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
    )
    learner.forward_backward([item], [1 / 7], Tally())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def step_gradient(model, items) -> torch.Tensor:
    """The gradient of all calls, computed as in training: merged into a tree."""
    model.zero_grad()
    learner = Learner(
        model,
        objective=Objective(),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
    )
    learner.forward_backward(items, [1 / 7] * len(items), Tally())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        (last, [False, True, False, False]),
        (per_agent, [False, True, False, False]),
        (reward_to_go, [True, True, False, False]),
        (discounted(0.5), [True, True, False, False]),
        (identical, [True, True, True, False]),
    ],
    ids=["last", "per-agent", "reward-to-go", "discounted", "identical"],
)
def test_one_calls_reward_changes_the_gradient_of_the_calls_the_rule_says_and_of_no_other(
    model, rule, changed
):
    before, after = (credit(group(model, reward), rule=rule) for reward in (0.0, 0.3))
    moved = []
    for old, new in zip(before, after, strict=True):
        difference = contribution(model, new) - contribution(model, old)
        moved.append(bool(difference.abs().max() > 1e-6))
        if not moved[-1]:
            assert difference.abs().max() == 0
    assert moved == changed


def test_the_steps_gradient_moves_by_what_the_rewarded_call_adds(model):
    before, after = (credit(group(model, reward), rule=last) for reward in (0.0, 0.3))
    whole = step_gradient(model, after) - step_gradient(model, before)
    own = contribution(model, after[1]) - contribution(model, before[1])
    assert own.abs().max() > 1e-4
    torch.testing.assert_close(whole, own, rtol=1e-4, atol=1e-6)
