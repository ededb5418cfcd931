"""The smallest things that can be trained: a tiny model, its critic, and one question."""

from contextlib import nullcontext

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fulmen.launch.crediting import make_crediting, make_scorers
from fulmen.launch.objective import make_objective
from fulmen.learner.critic import Critic, OwnCritic, SharedCritic
from fulmen.learner.learner import Learner
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.schema.config import make_config
from fulmen.schema.fitting import CRITIC_ADVANTAGES
from fulmen.schema.records import Trajectory, Transition
from fulmen.schema.training import TrainConfig
from fulmen.trainer.crediting import credit_trajectories
from fulmen.trainer.learners import Learners, Trained
from fulmen.trainer.weights import UNWEIGHTED

NEEDED = {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"}
PROMPT = (1, 2, 3)
GOOD = 7
"""The token that is rewarded."""


def config(**changes) -> TrainConfig:
    return make_config(TrainConfig, NEEDED | changes)


def tiny_policy(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
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
    return OwnCritic(tiny_policy(), optimiser=OptimiserConfig(learning_rate=0.01))


class Training:
    """Everything from rollouts to weights, as the settings say."""

    def __init__(
        self,
        settings: TrainConfig,
        policy: Qwen3ForCausalLM,
        reference: Qwen3ForCausalLM | None = None,
    ) -> None:
        self.learner = Learner(
            policy,
            objective=make_objective(settings),
            optimiser=OptimiserConfig(learning_rate=0.01),
            updating=lambda _: nullcontext(),
            critic=critic_of(settings, policy),
            reference=reference,
        )
        self.crediting = make_crediting(settings, (), UNWEIGHTED)
        self.scorers = make_scorers(settings, Learners([Trained("", self.learner, lambda _: None)]))

    def step(self, rollouts: list[Trajectory]) -> dict[str, float]:
        credited = credit_trajectories(rollouts, self.crediting, self.scorers)
        return self.learner.learn(credited)


class Bandit:
    """One question, two tokens as the answer, a reward for one of the tokens as the first."""

    def __init__(self, model: Qwen3ForCausalLM, seed: int) -> None:
        self.model, self.generator = model, torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def chance(self, *said: int) -> torch.Tensor:
        """(V,) of each token, after what was said."""
        ids = torch.tensor([(*PROMPT, *said)])
        return self.model(input_ids=ids).logits[0, -1].softmax(-1)

    def rollouts(self, version: int) -> list[Trajectory]:
        """Four groups of eight."""
        return [self._rollout(number, version) for number in range(32)]

    def _rollout(self, number: int, version: int) -> Trajectory:
        answer: list[int] = []
        logprobs: list[float] = []
        for _ in range(2):
            chance = self.chance(*answer)
            answer.append(int(torch.multinomial(chance, 1, generator=self.generator)))
            logprobs.append(float(chance[answer[-1]].log()))
        transition = call(number, PROMPT, tuple(answer), tuple(logprobs), version=version)
        return Trajectory(
            rollout_id=str(number),
            group=str(number // 8),
            transitions=(transition,),
            reward=float(answer[0] == GOOD),
        )


def call(
    number: int,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    logprobs: tuple[float, ...],
    *,
    version: int = 0,
    reward: float = 0.0,
    state: str = "start",
) -> Transition:
    return Transition(
        rollout_id=str(number),
        call_id=f"{number}-{len(prompt)}",
        agent="agent",
        prompt_ids=prompt,
        completion_ids=answer,
        logprobs=logprobs,
        temperature=1.0,
        version=version,
        reward=reward,
        state=state,
    )


def uneven_rollouts(model: Qwen3ForCausalLM, seed: int) -> list[Trajectory]:
    """Four groups of three rollouts in which nothing is alike: one or two calls of one to four
    tokens, rewards on the way, one group whose final rewards are equal; and an engine whose
    probabilities are up to two thirds more, or less, than the model's."""
    random = torch.Generator().manual_seed(seed)

    def one_of(count: int) -> int:
        return int(torch.randint(count, (), generator=random))

    found = []
    for number in range(12):
        group, calls, prompt = number // 3, [], PROMPT
        for turn in range(1 + one_of(2)):
            answer = tuple(one_of(12) for _ in range(1 + one_of(4)))
            recorded = _logprobs(model, prompt, answer)
            recorded = recorded + torch.rand(len(answer), generator=random) - 0.5
            reward = 0.25 * one_of(3) if turn == 0 else 0.0
            state = f"{group}-{turn}"
            told = tuple(recorded.tolist())
            calls.append(call(number, prompt, answer, told, reward=reward, state=state))
            prompt = (*prompt, *answer, 5)
        final = 1.0 if group == 0 else 0.5 * one_of(4)
        found.append(
            Trajectory(
                rollout_id=str(number), group=str(group), transitions=tuple(calls), reward=final
            )
        )
    return found


@torch.no_grad()
def _logprobs(
    model: Qwen3ForCausalLM, prompt: tuple[int, ...], answer: tuple[int, ...]
) -> torch.Tensor:
    table = model(input_ids=torch.tensor([(*prompt, *answer)])).logits[0].log_softmax(-1)
    rows = table[len(prompt) - 1 : -1]
    return rows[torch.arange(len(answer)), torch.tensor(answer)]
