"""Token scores in chunks against the formula written down at once."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from batches import batch_of, credited
from fulmen.learner.logprobs import score
from fulmen.learner.vocabulary import Predictions, TokenScores, token_scores

VOCABULARY, WIDTH = 37, 8


def direct(hidden, weight, targets, temperatures, allowed) -> TokenScores:
    """The definition, row by row, over the tokens that were possible and no others."""
    chosen, entropy = [], []
    for row, target in enumerate(targets):
        logits = weight[allowed[row]] @ hidden[row] / temperatures[row]
        p = logits.softmax(0)
        chosen.append((weight[target] @ hidden[row] / temperatures[row]) - logits.logsumexp(0))
        entropy.append(-(p * p.log()).sum())
    return TokenScores(torch.stack(chosen), torch.stack(entropy))


def predictions(hidden: Tensor, weight: Tensor) -> Predictions:
    return Predictions(hidden, lambda rows: rows @ weight.T, VOCABULARY)


def bits(allowed: Tensor) -> list[np.ndarray]:
    """Rows of bools as grammar masks."""
    words = -(-allowed.shape[1] // 32)
    padded = np.zeros((len(allowed), words * 32), dtype=bool)
    padded[:, : allowed.shape[1]] = allowed.numpy()
    packed = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return list(packed)


def inputs(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(count, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (count,))
    temperatures = torch.rand(count) + 0.5
    return hidden, weight, targets, temperatures


def gradients(scores: TokenScores, hidden, weight, weights: Tensor, bonus: float):
    loss = (scores.logprobs * weights).sum() + bonus * scores.entropy.sum()
    return torch.autograd.grad(loss, (hidden, weight))


@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    rows=st.integers(1, 13),
    seed=st.integers(0, 1000),
    bonus=st.sampled_from([0.0, 0.3]),
    masked=st.booleans(),
)
def test_any_chunks_give_values_and_gradients_of_the_direct_formula(
    count, rows, seed, bonus, masked
):
    hidden, weight, targets, temperatures = inputs(count, seed)
    allowed = torch.rand(count, VOCABULARY) < (0.5 if masked else 2)
    allowed[torch.arange(count), targets] = True
    got = token_scores(
        predictions(hidden, weight),
        targets,
        temperatures,
        masks=bits(allowed) if masked else (),
        entropy_gradient=bonus > 0,
        max_logits=rows * VOCABULARY,
    )
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = direct(exact[0], exact[1], targets, temperatures.double(), allowed)
    torch.testing.assert_close(got.logprobs, want.logprobs.float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got.entropy, want.entropy.float(), rtol=1e-6, atol=2e-6)
    shares = torch.randn(count)
    if bonus == 0:
        got = got._replace(entropy=got.entropy.detach())
    ours = gradients(got, hidden, weight, shares, bonus)
    theirs = gradients(want, exact[0], exact[1], shares.double(), bonus)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=5e-6)


def test_rows_without_a_mask_may_stand_beside_rows_with_one():
    hidden, weight, targets, temperatures = inputs(4)
    allowed = torch.zeros(4, VOCABULARY, dtype=torch.bool)
    allowed[torch.arange(4), targets] = True
    masks = [bits(allowed)[0], None, None, bits(allowed)[3]]
    got = token_scores(
        predictions(hidden, weight),
        targets,
        temperatures,
        masks=masks,
        max_logits=VOCABULARY,
    )
    free = direct(hidden, weight, targets, temperatures, torch.ones_like(allowed))
    assert got.logprobs[[0, 3]].tolist() == [0.0, 0.0], "nothing else was possible"
    torch.testing.assert_close(got.logprobs[1:3], free.logprobs[1:3])


def test_no_token_is_no_score():
    hidden, weight, targets, temperatures = inputs(0)
    got = token_scores(
        predictions(hidden, weight),
        targets,
        temperatures,
    )
    assert got.logprobs.shape == got.entropy.shape == (0,)


def test_entropy_has_no_gradient_unless_asked():
    hidden, weight, targets, temperatures = inputs(5)
    for wanted in (False, True):
        got = token_scores(
            predictions(hidden, weight),
            targets,
            temperatures,
            entropy_gradient=wanted,
            max_logits=VOCABULARY,
        )
        assert got.entropy.requires_grad is wanted


def test_without_gradients_nothing_is_kept_for_a_backward_pass():
    hidden, weight, targets, temperatures = inputs(5)
    with torch.no_grad():
        got = token_scores(
            predictions(hidden, weight),
            targets,
            temperatures,
            entropy_gradient=True,
            max_logits=VOCABULARY,
        )
    assert not got.logprobs.requires_grad
    assert not got.entropy.requires_grad


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return made


@pytest.mark.parametrize("masked", [False, True])
def test_no_tensor_is_larger_than_a_chunk_of_logits_in_either_pass(masked):
    count, rows = 400, 16
    hidden, weight, targets, temperatures = inputs(count)
    masks = bits(torch.ones(count, VOCABULARY, dtype=torch.bool)) if masked else ()
    with Largest() as largest:
        scores = token_scores(
            predictions(hidden, weight),
            targets,
            temperatures,
            masks=masks,
            entropy_gradient=True,
            max_logits=rows * VOCABULARY,
        )
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert hidden.grad is not None
    # The largest but for a mask's bits, of which there are whole words, is the hidden states.
    assert largest.elements <= max(rows * -(-VOCABULARY // 32) * 32, count * WIDTH)
    assert count * VOCABULARY > 4 * largest.elements


SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
SCALED: dict[str, Any] = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(logits_scaling=3.0, **SHAPE)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(final_logit_softcapping=0.5, head_dim=8, **SHAPE)
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(logit_scale=0.25, **SHAPE)),
}


@pytest.mark.parametrize("family", SCALED)
def test_families_that_scale_or_cap_their_logits_are_scored_as_they_compute_them(family):
    torch.manual_seed(0)
    model = SCALED[family]().eval()
    ids = (3, 1, 4, 1, 5, 9, 2)
    got = score(model, batch_of([credited(ids[:3], ids[3:])], layout="chain")).logprobs
    table = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
    want = table[torch.arange(2, 6), torch.tensor(ids[3:])]
    torch.testing.assert_close(got, want)
