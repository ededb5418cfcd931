"""Calc-mini under TRL's `GRPOTrainer`, run by `training.py` with the Python that has TRL.

One argument, the settings as JSON (`Settings`). Every so many steps it writes a checkpoint, says on
standard output where it stands, one JSON object a line, and waits for a line on standard input, its
clock stopped: `go` to go on, anything else to end. What the libraries print goes to standard error.

What is the same as in `fulmen train`, and by which setting, is at `trainer_settings`. What has no
counterpart:

* the advantage is divided by the sample's standard deviation (÷ 7) plus 1e-4, where Fulmen takes
  the population's (÷ 8): it is 6 % smaller here, which clipping and Adam hardly notice;
* where a step has several updates, each is on a random share of its rollouts, where Fulmen keeps
  groups together; and what they are held near is computed once more, because generation does not
  record it;
* when the last allowed call still asks for the tool, TRL does not run it; either way the rollout
  has no answer and is worth nothing;
* random numbers.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore
from trl.chat_template_utils import qwen3_template  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Settings:
    """What `training.py` asks for."""

    example: str
    """Folder of Calc-mini, for its calculator and its grader."""
    model: str
    tasks: str
    """JSONL with question and answer; taken in this order."""
    out: str
    steps: int
    """Where the schedule ends."""
    tasks_per_step: int
    group_size: int
    updates: int
    """Optimiser steps on the rollouts of a step."""
    learning_rate: float
    entropy: float
    max_tokens: int
    """Of one call."""
    checkpoint_every: int
    seed: int


settings = Settings(**json.loads(sys.argv[1]))
sys.path.append(settings.example)

import grader  # pyright: ignore
import plain_agent  # pyright: ignore

WARMUP_STEPS, LEAST_RATE = 5, 0.05
CALLS = 3
"""Of the model in one rollout: AutoGen's `max_tool_iterations`."""
LONGEST = 320
"""Tokens of a rollout after its question: three calls and what the tool says between them."""


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: expression
    """
    Counts.tool_calls += 1
    return plain_agent.calculator(expression)


class Counts:
    """Of the step under way."""

    tool_calls = 0
    reward = 0.0


def reward(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """The example's own grader on the last message, if that is text."""
    scores = [
        float(grader.score({"answer": right}, last["content"]))
        if (last := messages[-1])["role"] == "assistant" and not last.get("tool_calls")
        else 0.0
        for messages, right in zip(completions, answer, strict=True)
    ]
    Counts.reward = sum(scores) / len(scores)
    return scores


def tokenizer() -> PreTrainedTokenizerBase:
    """With TRL's own reader of Qwen3's tool calls, and the agent's description of the tool.

    TRL describes a tool in its own words, 240 tokens more than the description that the base model
    was made with; the template says the latter instead.
    """
    made = AutoTokenizer.from_pretrained(settings.model)
    made.response_template = qwen3_template
    description = json.dumps(plain_agent.CALCULATOR)
    made.chat_template = made.chat_template.replace("tool | tojson", repr(description))
    return made


def dataset() -> Dataset:
    """Prompts as the agent writes them."""
    tasks = [json.loads(line) for line in Path(settings.tasks).read_text().splitlines()]
    rows = [
        {
            "prompt": [
                {"role": "system", "content": plain_agent.INSTRUCTIONS},
                {"role": "user", "content": task["question"]},
            ],
            "answer": task["answer"],
        }
        for task in tasks
    ]
    return Dataset.from_list(rows)


def rate(update: int) -> float:
    """Share of the peak learning rate in an update (0 is the first), as in Fulmen's optimiser."""
    warmup, total = WARMUP_STEPS * settings.updates, settings.steps * settings.updates
    if update < warmup:
        return (update + 1) / warmup
    return max(LEAST_RATE, 1 - (1 - LEAST_RATE) * update / total)


def trainer_settings() -> GRPOConfig:
    """Fulmen's numbers under TRL's names. What TRL calls a step is an update."""
    return GRPOConfig(
        output_dir=settings.out,
        max_steps=settings.steps * settings.updates,
        # Measured: 64, 32 or 16 rollouts at a time take as much CPU time as all at once.
        per_device_train_batch_size=settings.tasks_per_step
        * settings.group_size
        // settings.updates,
        steps_per_generation=settings.updates,
        gradient_accumulation_steps=1,
        num_generations=settings.group_size,
        num_iterations=1,
        shuffle_dataset=False,
        # The loss: clipped surrogate, mean over the sampled tokens of the step, no KL term.
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        scale_rewards="group",
        entropy_coef=settings.entropy,
        max_grad_norm=1.0,
        # Sampling: the model's own distribution, a limit for every call.
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs={"max_new_tokens": settings.max_tokens},
        max_completion_length=LONGEST,
        max_tool_calling_iterations=CALLS - 1,
        # Plain `generate` with a growing cache is the fastest here: continuous batching took ten
        # times as long on this CPU, a static cache 5 % longer.
        use_transformers_continuous_batching=False,
        # Not TRL's defaults: no recomputation, which is faster, and float32, as Fulmen has it;
        # bfloat16 took as much CPU time.
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        seed=settings.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class TimedTrainer(GRPOTrainer):
    """TRL's trainer with a clock at its rollouts; nothing else is changed."""

    rollout_s = 0.0
    sampled = 0
    transitions = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.rollout_s = time.perf_counter() - started
        sampled = output["completion_mask"] * output["tool_mask"]
        self.sampled = int(sampled.sum())
        self.transitions = transition_tokens(output["prompt_mask"], sampled)
        return output


def transition_tokens(prompts: torch.Tensor, sampled: torch.Tensor) -> int:
    """Tokens of all calls, each with its whole context: what single-turn training would compute.

    A call ends where its tokens do; its context is all before it.
    """
    ends = sampled.bool() & ~torch.nn.functional.pad(sampled, (0, 1))[:, 1:].bool()
    lengths = torch.arange(1, sampled.shape[1] + 1) + prompts.sum(1, keepdim=True)
    return int((lengths * ends).sum())


class Report(TrainerCallback):
    """Lines about steps; a checkpoint every so often, and the wait for an answer."""

    def __init__(self, out: Any, original: PreTrainedTokenizerBase) -> None:
        self.out, self.original = out, original
        self.trainer: TimedTrainer | None = None
        self.begun = self.paused = self.last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        assert self.trainer is not None
        step, more_updates = divmod(state.global_step, settings.updates)
        if more_updates:
            return
        seconds = time.perf_counter() - self.begun - self.paused
        due = step % settings.checkpoint_every == 0
        folder = Path(settings.out) / f"step-{step:06d}"
        if due:
            more["model"].save_pretrained(folder)
            self.original.save_pretrained(folder)
        line = {
            "step": step,
            "seconds": seconds,
            "step_s": seconds - self.last,
            "rollout_s": self.trainer.rollout_s,
            "sampled": self.trainer.sampled,
            "transitions": self.trainer.transitions,
            "tool_calls": Counts.tool_calls,
            "reward": Counts.reward,
            "checkpoint": str(folder) if due else None,
        }
        self.last, Counts.tool_calls = seconds, 0
        waiting = time.perf_counter()
        print(json.dumps(line), file=self.out, flush=True)
        if due and sys.stdin.readline().strip() != "go":
            control.should_training_stop = True
        self.paused += time.perf_counter() - waiting


def main() -> None:
    # Standard output is ours alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    report = Report(out, AutoTokenizer.from_pretrained(settings.model))
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=trainer_settings(),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        tools=[calculator],
        optimizers=(optimiser, schedule),
        callbacks=[report],
    )
    report.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
