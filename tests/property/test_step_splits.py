"""Any split of any window gives the same gradient; any mixture of good and bad windows keeps the counters straight."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.step import Step
from step_jobs import Poisoned, flat, loss_sum, net

NUM_TOKENS = 13


def data() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(8)
    return torch.randn(NUM_TOKENS, 7, generator=rng, dtype=torch.float64), torch.randint(
        0, 5, (NUM_TOKENS,), generator=rng
    )


def after_one_window(cuts: list[int], tensor_weight: bool, as_mean: bool) -> tuple[list[float], float, float]:
    inputs, targets = data()
    edges = [0, *sorted(cuts), NUM_TOKENS]
    parts = [(inputs[a:b], targets[a:b]) for a, b in pairwise(edges)]
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0), max_norm=0.7)
    window = step.window(parts)
    for batch in window:
        count = len(batch[1])
        weight = torch.tensor(count) if tensor_weight else count
        if as_mean and count:
            window.backward(mean=loss_sum(model, batch) / count, weight=weight)
        else:
            window.backward(loss_sum(model, batch), weight)
    outcome = window.step()
    return flat(model), outcome.loss, outcome.grad_norm


@settings(max_examples=60)
@given(st.lists(st.integers(0, NUM_TOKENS), max_size=9), st.booleans(), st.booleans())
def test_any_split_gives_the_same_update(cuts: list[int], tensor_weight: bool, as_mean: bool) -> None:
    expected = after_one_window([], False, False)
    got = after_one_window(cuts, tensor_weight, as_mean)
    for one, other in zip(got, expected, strict=True):
        difference = torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
        assert float(difference.abs().max()) <= 1e-13  # float64: the order of at most 13 additions


KINDS = st.sampled_from(["good", "bad loss", "bad gradient", "no weight"])


@settings(max_examples=40)
@given(st.lists(KINDS, min_size=1, max_size=12))
def test_counters_and_parameters_of_any_mixture(kinds: list[str]) -> None:
    """The parameters are those of the good windows alone; counters say what happened."""
    model, alone = net(norm=True), net(norm=True)
    step = Step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    reference = Step(alone, torch.optim.AdamW(alone.parameters(), lr=0.1))
    inputs, targets = data()
    for kind in kinds:
        window = step.window([(inputs, targets)], num_samples=[3])
        for batch in window:
            loss = loss_sum(model, batch)
            if kind == "bad loss":
                loss = loss * math.inf
            if kind == "bad gradient":
                loss = Poisoned.apply(loss)
            window.backward(loss, 0 if kind == "no weight" else NUM_TOKENS)
        assert window.step().updated is (kind == "good")
        if kind == "good":
            window = reference.window([(inputs, targets)])
            for batch in window:
                window.backward(loss_sum(alone, batch), NUM_TOKENS)
            window.step()
    num_good = kinds.count("good")
    assert flat(model) == flat(alone)
    assert [b.tolist() for b in model.buffers()] == [b.tolist() for b in alone.buffers()]
    progress = step.progress
    assert (progress.windows, progress.updates, progress.skipped) == (len(kinds), num_good, len(kinds) - num_good)
    assert progress.samples == 3 * len(kinds)
