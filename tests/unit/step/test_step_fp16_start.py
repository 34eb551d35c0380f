"""Summed fp16 losses overflow no earlier than their mean would, from the run's first window on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rank_pool import RankPool
from samerun.step import Step
from step_jobs import batches, fp16_scale_start, loss_sum, net


def test_the_first_loss_sets_the_shift_for_its_whole_window() -> None:
    answer = fp16_scale_start("solo", [13, 13, 13], num_windows=2)
    expected = math.ceil(math.log2(39))
    assert answer["shifts"] == [None] + [expected] * 6


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_start_with_one_shift(ranks: RankPool, world_size: int) -> None:
    """Ranks see 1 and many tokens; a shift of their own each would weigh their gradients differently."""
    counts = [1, 60, 1, 60, 1, 60]
    answers = ranks.run(world_size, "step_jobs:fp16_scale_start", wrap="ddp", counts=counts, num_windows=1)
    shifts = {tuple(answer["shifts"][1:]) for answer in answers}
    assert {len(set(one)) for one in shifts} == {1}
    assert len({one[0] for one in shifts}) == 1


def test_a_first_batch_without_tokens_starts_unshifted() -> None:
    model = net(dtype=torch.float32)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    window = step.window(batches([2, 6], torch.float32))
    for number, batch in enumerate(window):
        window.backward(loss_sum(model, batch) * min(number, 1), 0 if number == 0 else 6)
        assert step.state_dict()["scaler"]["shift"] == 0
    window.step()
    assert step.state_dict()["scaler"]["shift"] == 3


class Sensitive(nn.Module):
    """An activation gradient in fp16 that is as large as the loss that is sent back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


NUM_TOKENS = 4096
TARGET_SCALE = 2.0**12


def run_sum(*, shifted: bool) -> str:
    """One window of 4,096 equal tokens: the summed gradient in fp16 is 4,096 times the mean's."""
    model = Sensitive()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="fp16")
    state = step.state_dict()
    shift = None if shifted else 0
    step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": TARGET_SCALE, "shift": shift}})
    window = step.window([torch.ones(NUM_TOKENS, 1)])
    for batch in window:
        window.backward(model(batch).float().sum(), NUM_TOKENS)
    return window.step().reason.value


def test_a_sum_survives_the_scale_that_its_mean_survives() -> None:
    """mean·scale = 4,096 fits fp16 (65,504); sum·scale = 16,777,216 does not: the unshifted control overflows."""
    assert run_sum(shifted=True) == "updated"
    assert run_sum(shifted=False) == "non_finite_grad"


@pytest.mark.parametrize("weight", [1, 2, 3, 7, 8, 9, 1000, 4096, 4097])
def test_the_shifted_sum_is_at_most_the_mean_and_at_least_half(weight: int) -> None:
    model = net(dtype=torch.float32)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="fp16")
    window = step.window(batches([3], torch.float32))
    for batch in window:
        window.backward(loss_sum(model, batch), weight)
    window.step()
    shift = step.state_dict()["scaler"]["shift"]
    assert 0.5 < weight / 2.0**shift <= 1.0


def test_the_shift_is_saved_with_the_scale() -> None:
    model = net(dtype=torch.float32)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="fp16")
    window = step.window(batches([13], torch.float32))
    for batch in window:
        window.backward(loss_sum(model, batch), 13)
    window.step()
    again = net(dtype=torch.float32)
    other = Step(again, torch.optim.SGD(again.parameters(), lr=0.0), precision="fp16")
    other.load_state_dict(step.state_dict())
    assert other.state_dict() == step.state_dict()
    assert other.state_dict()["scaler"]["shift"] == 4


def test_a_half_loss_does_not_see_the_bare_scale() -> None:
    """65,536 is infinite in fp16; divided by the shift first, it is not."""
    model = Sensitive()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="fp16")
    window = step.window([torch.ones(4, 1)])
    for batch in window:
        window.backward((model(batch).sum() * 1e-3).half(), 4)
    outcome = window.step()
    assert outcome.updated and outcome.scale == 65536.0


def test_the_sum_behind_a_half_mean_does_not_overflow() -> None:
    model = Sensitive()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="fp16")
    window = step.window([torch.full((1, 1), 30.0)])
    for batch in window:
        window.backward(mean=(model(batch).sum() / 30.0 * 20.0).half(), weight=4096)  # 20 · 4,096 > 65,504
    outcome = window.step()
    assert outcome.loss == pytest.approx(20.0, rel=1e-3)
