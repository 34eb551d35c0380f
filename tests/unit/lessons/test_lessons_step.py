"""The step's lessons: the same numbers as torch, the same judgement as samerun's own window."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from rank_pool import RankPool
from samerun import lessons
from samerun.errors import UsageError
from samerun.step import SkipRate


def with_gradients(*values: float) -> list[nn.Parameter]:
    parameters = []
    for value in values:
        parameter = nn.Parameter(torch.zeros(()))
        parameter.grad = torch.tensor(value)
        parameters.append(parameter)
    return [*parameters, nn.Parameter(torch.zeros(3))]  # one without a gradient


def test_clipping_is_torchs() -> None:
    generator = torch.Generator().manual_seed(5)
    ours, theirs = ([nn.Parameter(torch.zeros(size)) for size in (7, 13, 1)] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn(mine.shape, generator=generator) * 10
        other.grad = mine.grad.clone()
    before, after = lessons.clip_global_l2_norm(ours, 0.5)
    expected = nn.utils.clip_grad_norm_(theirs, 0.5)
    assert before == pytest.approx(float(expected), rel=1e-6)  # float32 in torch, float64 here
    assert after == pytest.approx(0.5, rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_small_norm_is_left_alone() -> None:
    parameters = with_gradients(0.3, 0.4)
    assert lessons.clip_global_l2_norm(parameters) == (pytest.approx(0.5), pytest.approx(0.5))
    assert [float(p.grad) for p in parameters[:2] if p.grad is not None] == [pytest.approx(0.3), pytest.approx(0.4)]
    assert lessons.clip_global_l2_norm([]) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_seen_and_not_spread(bad: float) -> None:
    parameters = with_gradients(1.0, bad)
    assert lessons.has_non_finite_grad(parameters)
    assert not lessons.has_non_finite_grad(with_gradients(1.0, 65504.0))
    before, after = lessons.clip_global_l2_norm(parameters)
    assert not math.isfinite(before) and not math.isfinite(after)
    assert float(parameters[0].grad) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_limit_must_be_positive(max_norm: float) -> None:
    with pytest.raises(UsageError, match="max_norm"):
        lessons.clip_global_l2_norm([], max_norm)
    with pytest.raises(UsageError, match="max_norm"):
        lessons.AmpTrainState(nn.Linear(1, 1), max_norm=max_norm)


def test_the_rolling_skip_rate() -> None:
    log = [False, True, True, False, False]
    assert lessons.rolling_skip_rate(log, window=2) == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert lessons.rolling_skip_rate(log) == [0.0, 1 / 2, 2 / 3, 2 / 4, 2 / 5]
    assert lessons.rolling_skip_rate([]) == []
    long = lessons.rolling_skip_rate([True] * 3 + [False] * 999)
    assert (long[999], long[1001]) == (3 / 1000, 1 / 1000), "1000 rows by default"
    with pytest.raises(UsageError, match="window=0"):
        lessons.rolling_skip_rate(log, window=0)


def test_above_five_percent_is_an_alert() -> None:
    sick, well = SkipRate(), SkipRate()
    alerts = [sick.after(skipped=row % 17 == 0) for row in range(200)]  # 6 %
    assert sum(alert is not None for alert in alerts) == 1
    assert [well.after(skipped=row % 25 == 0) for row in range(200)] == [None] * 200  # 4 %


def infinite(model: nn.Module) -> None:
    next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]


def test_a_skipped_step_changes_nothing_and_says_why() -> None:
    torch.manual_seed(0)
    state = lessons.AmpTrainState(nn.Linear(7, 1), amp_dtype=torch.float16)
    inputs, targets = torch.randn(13, 7), torch.randn(13, 1)
    state.step(inputs, targets)
    before = [p.detach().clone() for p in state.model.parameters()]
    bad_loss = state.step(inputs * math.nan, targets)
    bad_gradient = state.step(inputs, targets, gradient_corruptor=infinite)
    assert [(row.tag, row.skip_reason) for row in state.log] == [
        ("STEP", ""), ("SKIP", "non_finite_loss"), ("SKIP", "non_finite_grad"),
    ]  # fmt: skip
    assert all(torch.equal(old, new) for old, new in zip(before, state.model.parameters(), strict=True))
    after = state.step(inputs, targets)
    assert (bad_loss.scale, bad_gradient.scale, after.scale) == (65536.0, 65536.0, 32768.0)
    assert state.skip_count == 2
    assert lessons.rolling_skip_rate(state.log)[-1] == 0.5


def test_defaults_of_the_step() -> None:
    state = lessons.AmpTrainState(nn.Linear(3, 1))
    assert state.amp_dtype is torch.bfloat16, "bf16 on cpu"
    assert lessons.DEFAULT_MAX_NORM == 1.0
    row = state.step(torch.full((2, 3), 1e4), torch.zeros(2, 1))
    assert row.grad_l2_pre_clip > 1.0 >= row.grad_l2_post_clip
    assert row.scale == 1.0, "bf16 needs no loss scale"


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UsageError, match=r"device_type='cuda', but the parameters are on 'cpu'"):
        lessons.AmpTrainState(nn.Linear(1, 1), device_type="cuda")
    with pytest.raises(UsageError, match=r"amp_dtype=torch.int8"):
        lessons.AmpTrainState(nn.Linear(1, 1), amp_dtype=torch.int8)
    with pytest.raises(UsageError, match="accum_steps=0"):
        lessons.loss_scaled_for_accum(torch.zeros(1), torch.zeros(1), 0, F.mse_loss)


def accumulated(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    weight = torch.zeros(7, 1, dtype=torch.float64, requires_grad=True)
    for inputs, targets in parts:
        lessons.loss_scaled_for_accum(inputs @ weight, targets, len(parts), F.mse_loss).backward()
    assert weight.grad is not None
    return weight.grad


def test_accumulated_losses_leave_the_gradient_of_one_batch_when_sizes_are_equal() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(16, 7, generator=generator, dtype=torch.float64)
    targets = torch.randn(16, 1, generator=generator, dtype=torch.float64)
    whole = accumulated([(inputs, targets)])
    equal = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
    torch.testing.assert_close(accumulated(equal), whole, rtol=1e-12, atol=0)
    unequal = list(zip(inputs.split([7, 1, 3, 5]), targets.split([7, 1, 3, 5]), strict=True))
    assert not torch.allclose(accumulated(unequal), whole, rtol=1e-2), "the mean of means is another objective"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_no_sync_leaves_one_exchange(ranks: RankPool, wrap: str) -> None:
    for found in ranks.run(2, "lesson_jobs:accumulate_without_sync", wrap=wrap):
        assert found["local_differs"], "inside, gradients are this rank's own"
        assert found["distance"] <= 1e-12, "after the last backward they are the mean over ranks of the sums"


def test_no_sync_of_a_plain_model_does_nothing() -> None:
    model = nn.Linear(2, 1)
    with lessons.no_sync_context(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_random_streams_come_back() -> None:
    import random

    import numpy as np

    def draws() -> list[Any]:
        return [random.random(), float(np.random.random()), torch.rand(3).tolist()]

    kept = lessons.capture_rng_state()
    first = draws()
    assert draws() != first
    lessons.restore_rng_state(kept)
    assert draws() == first
