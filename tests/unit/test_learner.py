"""The learner's numbers against independent witnesses: plain Python, whole-sequence forwards."""

import copy
import itertools
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from msgspec.structs import replace
from transformers import Qwen3ForCausalLM

from batches import batch_of, credited
from fulmen.learner.learner import Learner, shares
from fulmen.learner.logprobs import score
from fulmen.learner.losses import clipped_surrogate, supervised
from fulmen.learner.metrics import Tally
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.learner.terms import PolicyLoss, Terms
from fulmen.learner.weights import Whole
from fulmen.schema.errors import ModelError
from fulmen.schema.records import Credited
from models import tiny_model


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return tiny_model()


def conversation(rollout="r", advantage=1.0) -> list[Credited]:
    first = credited((1, 2, 3), (4, 5), advantage, rollout)
    second = credited((1, 2, 3, 4, 5, 6, 7), (8, 9, 10), advantage, rollout)
    return [first, second]


def learner(model, reference=None, **loss) -> Learner:
    return Learner(
        model,
        reference=reference,
        objective=Objective(**loss),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
    )


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("groups", "parts"), [("aabbb", 2), ("aaaaa", 3), ("abcab", 9)])
def test_an_update_has_whole_groups_or_if_they_are_too_few_whole_rollouts(groups, parts):
    items = [
        replace(call, group=group)
        for number, group in enumerate(groups)
        for call in conversation(f"{number}")
    ]
    split = shares(items, parts)
    assert sorted(map(id, itertools.chain(*split))) == sorted(map(id, items))
    assert len(split) == min(parts, 5)
    whole = [
        {c.group if len(set(groups)) >= parts else c.transition.rollout_id for c in s}
        for s in split
    ]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(whole, 2))


def test_log_probabilities_equal_a_plain_forward_at_the_sampling_temperature(model):
    items = [credited((1, 2, 3), (4, 5), temperature=0.7), credited((9,), (8, 7, 6), rollout="s")]
    batch = batch_of(items, layout="chain")
    got = score(model, batch)
    want = []
    for row, temperature in (((9, 8, 7, 6), 1.0), ((1, 2, 3, 4, 5), 0.7)):
        logits = model(input_ids=torch.tensor([row])).logits[0] / temperature
        table = torch.log_softmax(logits, -1)
        start = 1 if row[0] == 9 else 3
        want += [table[i - 1, row[i]].item() for i in range(start, len(row))]
    torch.testing.assert_close(got.logprobs, torch.tensor(want), rtol=1e-5, atol=1e-5)


def test_entropy_is_that_of_the_sampling_distribution(model):
    batch = batch_of([credited((1, 2), (3,))], layout="chain")
    table = torch.log_softmax(model(input_ids=torch.tensor([[1, 2]])).logits[0, -1], -1)
    want = -sum(math.exp(v) * v for v in table.tolist())
    assert score(model, batch).entropy.item() == pytest.approx(want, rel=1e-5)


def test_micro_batches_change_nothing_but_memory(model):
    items = [*conversation("a", 0.5), credited((3, 3), (1, 2), 2.0, "c")]
    learner(model, micro_batch_tokens=10_000).forward_backward(items, [1 / 7] * 3, Tally())
    large = gradient(model)
    model.zero_grad()
    learner(model, micro_batch_tokens=1).forward_backward(items, [1 / 7] * 3, Tally())
    torch.testing.assert_close(large, gradient(model), rtol=1e-5, atol=1e-7)


def test_a_step_makes_rewarded_tokens_likelier_and_punished_ones_rarer(model):
    good, bad = credited((1, 2), (3,), 1.0, "g"), credited((1, 2), (4,), -1.0, "b")

    def logprobs():
        with torch.no_grad():
            return torch.log_softmax(model(input_ids=torch.tensor([[1, 2]])).logits[0, -1], -1)

    before = logprobs()
    items = [
        Credited(
            advantage=i.advantage,
            transition=credited(
                i.transition.prompt_ids,
                i.transition.completion_ids,
                logprobs=[before[i.transition.completion_ids[0]].item()],
                rollout=i.transition.rollout_id,
            ).transition,
        )
        for i in (good, bad)
    ]
    trainer = learner(model)
    metrics = trainer.learn(items)
    after = logprobs()
    assert after[3] > before[3]
    assert after[4] < before[4]
    assert trainer.version == 1
    assert metrics["learn/gap_max"] < 1e-5
    assert metrics["learn/updates"] == 1


def test_without_signal_nothing_changes_and_nothing_is_reported_as_zero(model):
    before = copy.deepcopy(model.state_dict())
    trainer = learner(model)
    metrics = trainer.learn([credited((1, 2), (3,), 0.0)])
    assert trainer.version == 0
    assert "learn/loss" not in metrics
    assert "learn/grad_norm" not in metrics
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_rollouts_of_advantage_zero_stay_in_the_denominator(model):
    loud, silent = credited((1, 2), (3,), 1.0, "a"), credited((1, 2), (4,), 0.0, "b")
    learner(model).forward_backward([loud], [1 / 2], Tally())
    want = gradient(model).norm().item()
    metrics = learner(copy.deepcopy(model)).learn([loud, silent])
    assert metrics["learn/grad_norm"] == pytest.approx(want, rel=1e-4)


def test_the_kl_term_pulls_back_to_the_reference(model):
    trainer = learner(model, kl_coefficient=1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    item = credited((1, 2), (3, 4, 5), 0.0)
    first = trainer.learn([item])["learn/kl_reference"]
    later = [trainer.learn([item])["learn/kl_reference"] for _ in range(20)]
    assert later[-1] < 0.5 * first


def test_a_reference_loaded_by_itself_is_computed_over_the_same_trees(model):
    branches = [*conversation(), credited((1, 2, 3, 4, 5, 11), (12, 13), rollout="s")]
    reference = copy.deepcopy(model)
    trainer = learner(model, reference=reference, kl_coefficient=1.0)
    trainer.layout = "tree"
    assert trainer.learn(branches)["learn/kl_reference"] < 1e-9


def test_a_reference_that_ignores_the_tree_is_refused_though_the_policy_follows_it(model):
    branches = [*conversation(), credited((1, 2, 3, 4, 5, 11), (12, 13), rollout="s")]
    reference = Whole(copy.deepcopy(model))
    trainer = learner(model, reference=reference, kl_coefficient=1.0)
    trainer.layout = "tree"
    with pytest.raises(ModelError, match="does not take another in its place"):
        trainer.learn(branches)


def test_the_entropy_bonus_spreads_the_policy_even_where_no_rollout_stands_out(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    item, trainer = credited((1, 2), (3, 4, 5), 0.0), learner(model, entropy_coefficient=1.0)
    first = trainer.learn([item])["learn/entropy"]
    later = [trainer.learn([item])["learn/entropy"] for _ in range(20)]
    assert later[-1] > first + 0.05
    assert "learn/entropy" not in learner(model).learn([item])


def test_several_updates_a_step_use_every_rollout_once(model):
    items = [c for name in "abcde" for c in conversation(name, 1.0)]
    trainer = learner(model, updates_per_step=2)
    metrics = trainer.learn(items)
    assert metrics["learn/updates"] == 2
    assert trainer.version == 2
    assert metrics["learn/computed_tokens"] == 18


def test_several_epochs_are_as_much_learning_as_several_steps_on_the_same_calls(model):
    """The anchor of both is what the engine recorded."""
    items = [c for name in "abc" for c in conversation(name, 1.0)]
    twin_model = copy.deepcopy(model)
    metrics = learner(model, epochs=3, updates_per_step=2).learn(items)
    twin = learner(twin_model, updates_per_step=2)
    each = [twin.learn(items) for _ in range(3)]
    assert (metrics["learn/updates"], twin.version) == (6, 6)
    assert metrics["learn/loss"] == pytest.approx(sum(step["learn/loss"] for step in each) / 3)
    assert metrics["learn/sampled_tokens"] == each[0]["learn/sampled_tokens"]
    assert metrics["learn/computed_tokens"] == 3 * each[0]["learn/computed_tokens"]
    assert metrics["learn/gap_mean"] == each[0]["learn/gap_mean"], "later differences are learning"
    for ours, theirs in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_every_epoch_is_held_near_the_policy_of_before_the_step(model):
    """One call, a region that the first update leaves: the other two have nothing to add."""
    narrow = partial(clipped_surrogate, low=1e-4, high=1e-4)
    trainer = learner(model, epochs=3, old="learner", loss=narrow)
    metrics = trainer.learn([credited((1, 2), (3, 4))])
    assert (metrics["learn/updates"], metrics["learn/empty_updates"]) == (1, 2)
    assert metrics["learn/clip_fraction"] == pytest.approx(2 / 3)


def test_tokens_that_exclude_themselves_in_every_epoch_are_counted_once(model):
    items = [credited((1, 2), (3, 4), logprobs=UNKNOWN), credited((1, 2), (5,), rollout="s")]
    assert learner(model, epochs=3).learn(items)["learn/unusable_tokens"] == 2


def test_saving_and_loading_goes_on_exactly_where_it_was(model, tmp_path):
    items = conversation()
    trainer = learner(model)
    trainer.learn(items)
    trainer.save(tmp_path)
    twin_model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    twin = learner(twin_model)
    twin.load(tmp_path)
    assert twin.version == 1
    assert trainer.learn(items)["learn/loss"] == twin.learn(items)["learn/loss"]
    for ours, theirs in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(model):
    """One update with a loss that is NaN, then a sound one."""

    def broken(terms: Terms) -> PolicyLoss:
        return PolicyLoss(terms.logprobs * math.nan, terms.old.exp(), terms.old > 1)

    before = copy.deepcopy(model.state_dict())
    trainer = learner(model, loss=broken)
    metrics = trainer.learn([credited((1, 2), (3,))])
    assert (metrics["learn/skipped_updates"], metrics["learn/updates"]) == (1.0, 0.0)
    assert metrics["learn/empty_updates"] == 0
    assert trainer.version == 0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    sound = learner(model).learn([credited((1, 2), (3,))])
    assert math.isfinite(sound["learn/grad_norm"])


def nothing(terms: Terms) -> torch.Tensor:
    """A correction that leaves every token out."""
    return torch.zeros_like(terms.old)


UNKNOWN = [math.nan, math.nan]
SILENT = {
    "unusable": ({}, credited((1, 2), (3, 4), logprobs=UNKNOWN)),
    "corrected-away": ({"correction": nothing}, credited((1, 2), (3, 4))),
    "ignored-by-the-loss": ({"loss": supervised}, credited((1, 2), (3, 4), -1.0)),
    "clipped": ({}, credited((1, 2), (3, 4), logprobs=[-30.0, -30.0])),
}


@pytest.mark.parametrize("why", SILENT)
def test_an_update_in_which_no_token_has_a_say_is_not_made_whatever_came_before(model, why):
    """After a sound one, whose momentum would move the weights."""
    loss, item = SILENT[why]
    trainer = learner(model)
    assert trainer.learn([credited((1, 2), (3,))])["learn/updates"] == 1
    trainer.objective = Objective(**loss)
    before = copy.deepcopy(model.state_dict())
    metrics = trainer.learn([item])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert trainer.version == 1
    assert (metrics["learn/empty_updates"], metrics["learn/updates"]) == (1.0, 0.0)
    assert metrics["learn/skipped_updates"] == 0
    assert "learn/grad_norm" not in metrics


def test_one_token_with_a_say_is_enough_for_an_update(model):
    items = [credited((1, 2), (3, 4), logprobs=UNKNOWN), credited((1, 2), (5,), rollout="s")]
    metrics = learner(model).learn(items)
    assert (metrics["learn/updates"], metrics["learn/empty_updates"]) == (1.0, 0.0)


def test_a_loss_of_ones_own_sees_every_call_with_a_completion(model):
    """One that leans on what is not in the advantage."""
    seen = []

    def likelier(terms: Terms) -> PolicyLoss:
        seen.append(terms.advantages.tolist())
        return PolicyLoss(-terms.logprobs, terms.old.exp(), terms.old > 1)

    items = [credited((1, 2), (3, 4), 0.0), credited((1, 2), (), rollout="s")]
    assert learner(model, loss=likelier).learn(items)["learn/updates"] == 0
    metrics = learner(model, loss=likelier, every_call=True).learn(items)
    assert metrics["learn/updates"] == 1
    assert seen == [[0.0, 0.0]]
