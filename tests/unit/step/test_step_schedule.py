"""Learning rates: pure functions of a named clock, and torch's schedulers stepped once per update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rank_pool import RankPool
from samerun.core.progress import Progress
from samerun.errors import MismatchError, UsageError
from samerun.step import Step
from samerun.step.schedule import (
    Clock,
    ClockedSchedule,
    Constant,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    is_curve,
)
from step_jobs import batches, loss_sum, net, ten_updates

CURVES = [
    Constant(),
    Constant(warmup=5),
    WarmupLinear(warmup=5, total=20, final=0.1),
    WarmupCosine(warmup=5, total=20, final=0.1),
    WarmupStableDecay(warmup=5, total=20, decay=8, final=0.1),
]


@pytest.mark.parametrize(
    ("curve", "values"),
    [
        (Constant(), {1: 1.0, 10**9: 1.0}),
        (Constant(warmup=4), {1: 0.25, 4: 1.0, 5: 1.0}),
        (WarmupLinear(warmup=4, total=8), {1: 0.25, 4: 1.0, 6: 0.5, 8: 0.0, 9: 0.0}),
        (WarmupLinear(total=4, final=0.5), {1: 0.875, 4: 0.5, 100: 0.5}),
        (WarmupCosine(warmup=4, total=8), {2: 0.5, 4: 1.0, 6: 0.5, 8: 0.0}),
        (WarmupCosine(warmup=4, total=7, final=0.1), {5: 0.1 + 0.9 * 0.75, 7: 0.1}),
        (WarmupStableDecay(warmup=2, total=10, decay=4), {1: 0.5, 2: 1.0, 6: 1.0, 8: 0.5, 10: 0.0}),
        (WarmupLinear(warmup=3, total=3), {3: 0.0}),
    ],
)
def test_published_shapes(curve: Any, values: dict[int, float]) -> None:
    for position, value in values.items():
        assert curve.factor(position) == pytest.approx(value, abs=1e-15)


@given(st.sampled_from(CURVES), st.integers(0, 40))
def test_a_rate_is_between_nothing_and_the_base(curve: Any, position: int) -> None:
    assert 0.0 <= curve.factor(position) <= 1.0


@pytest.mark.parametrize("curve", [WarmupLinear(warmup=5, total=20), WarmupCosine(warmup=5, total=20)])
def test_falls_after_the_warm_up(curve: Any) -> None:
    factors = [curve.factor(position) for position in range(5, 25)]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Constant(warmup=-1),
        lambda: WarmupLinear(warmup=5, total=4),
        lambda: WarmupCosine(total=0),
        lambda: WarmupCosine(total=10, final=2.0),
        lambda: WarmupStableDecay(warmup=5, total=10, decay=6),
        lambda: WarmupLinear(total=math.nan),
    ],
)
def test_impossible_curves_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        wrong()


def rates(step: Step, model: torch.nn.Module, windows: list[list[int]], *, bad: tuple[int, ...] = ()) -> list[float]:
    """The rate inside each window's update; windows in `bad` are skipped."""
    seen = []
    for number, counts in enumerate(windows):
        window = step.window(batches(counts), num_samples=[1] * len(counts))
        for batch in window:
            window.backward(loss_sum(model, batch) * (math.nan if number in bad else 1.0), len(batch[1]))
        outcome = window.step()
        seen.append(outcome.lr)
    return seen


def step_with(curve: Any, clock: str = "updates", lr: float = 0.5) -> tuple[torch.nn.Module, Step]:
    model = net()
    return model, Step(model, torch.optim.SGD(model.parameters(), lr=lr), scheduler=curve, clock=clock)


def test_the_update_clock_counts_updates_only() -> None:
    model, step = step_with(WarmupLinear(warmup=4, total=8))
    seen = rates(step, model, [[2]] * 6, bad=(1, 3))
    assert [seen[k] for k in (0, 2, 4, 5)] == [0.125, 0.25, 0.375, 0.5]


def test_the_sample_and_token_clocks_count_skipped_data() -> None:
    model, step = step_with(WarmupLinear(warmup=8, total=16), "samples")
    seen = rates(step, model, [[2, 3], [1, 1], [4, 4]], bad=(1,))
    assert [seen[0], seen[2]] == [0.5 * 2 / 8, 0.5 * 6 / 8]
    model, step = step_with(WarmupLinear(warmup=20, total=40), "tokens")
    seen = rates(step, model, [[2, 3], [4], [5]])
    assert seen == pytest.approx([0.5 * 5 / 20, 0.5 * 9 / 20, 0.5 * 14 / 20])


@pytest.mark.parametrize("clock", ["updates", "samples", "tokens"])
@pytest.mark.parametrize("cut", range(6))
def test_the_rate_inside_the_first_update_after_a_resume_is_the_twins(clock: str, cut: int) -> None:
    windows = [[2, 3], [4], [1, 1, 1], [6], [2], [3, 3]]
    model, step = step_with(WarmupCosine(warmup=3, total=30, final=0.1), clock)
    twin = rates(step, model, windows)
    model, step = step_with(WarmupCosine(warmup=3, total=30, final=0.1), clock)
    before = rates(step, model, windows[:cut])
    model, resumed = step_with(WarmupCosine(warmup=3, total=30, final=0.1), clock)
    resumed.load_state_dict(step.state_dict())
    assert before + rates(resumed, model, windows[cut:]) == twin


def test_another_curve_or_clock_on_resume_is_refused() -> None:
    _, step = step_with(WarmupCosine(total=30))
    for curve, clock in (
        (WarmupCosine(total=31), "updates"),
        (WarmupCosine(total=30), "tokens"),
        (Constant(), "updates"),
    ):
        with pytest.raises(MismatchError, match="schedule's"):
            step_with(curve, clock)[1].load_state_dict(step.state_dict())


def test_every_group_keeps_its_own_base() -> None:
    model = net()
    groups = [{"params": model.into.parameters(), "lr": 1.0}, {"params": model.out.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    step = Step(model, optimizer, scheduler=Constant(warmup=2))
    rates(step, model, [[2]])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1.0, 0.1]


def test_a_rate_in_a_tensor_is_filled_in_place() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0))
    home = optimizer.param_groups[0]["lr"]
    step = Step(model, optimizer, scheduler=Constant(warmup=4))
    assert rates(step, model, [[2], [3]]) == [0.25, 0.5]
    assert optimizer.param_groups[0]["lr"] is home and float(home) == 0.5
    plain = Step(model, optimizer)
    assert rates(plain, model, [[2]]) == [0.5]


def test_torch_schedulers_step_once_per_update() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = Step(model, optimizer, scheduler=scheduler)
    seen = rates(step, model, [[2, 2]] * 5, bad=(0, 2))
    assert [seen[k] for k in (1, 3, 4)] == [1.0, 0.5, 0.25]
    assert scheduler.last_epoch == 3


def test_constant_lr_of_torch_is_no_curve() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert not is_curve(torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5))
    assert is_curve(Constant())


def test_a_torch_scheduler_on_another_clock_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    with pytest.raises(UsageError, match="needs a curve"):
        Step(model, optimizer, scheduler=scheduler, clock="tokens")
    with pytest.raises(UsageError, match="choose one of 'updates'"):
        Step(model, optimizer, scheduler=Constant(), clock="epochs")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_world_size_never_enters(ranks: RankPool, world_size: int) -> None:
    if world_size == 1:
        answers = [ten_updates("solo")]
    else:
        answers = ranks.run(world_size, "step_jobs:ten_updates", wrap="ddp")
    assert answers == [{"count": 10, "lr": 0.5**10}] * world_size


def test_a_group_added_later_follows_the_curve_from_its_own_base() -> None:
    """Gradual unfreezing."""
    model, step = step_with(WarmupLinear(warmup=4, total=8), lr=1.0)
    rates(step, model, [[3]])
    head = torch.nn.Linear(1, 1)
    step._engine.updaters["model"]._optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    assert rates(step, model, [[3], [3]]) == [0.5, 0.75]
    groups = step._engine.updaters["model"]._optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.75, 0.375]
    _, fresh = step_with(WarmupLinear(warmup=4, total=8), lr=1.0)
    with pytest.raises(MismatchError, match="saved for 2 parameter groups, the optimizer has 1"):
        fresh.load_state_dict(step.state_dict())


def test_a_position_counted_by_one_counter_and_then_by_another_keeps_its_latest_exchange_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = ClockedSchedule(optimizer, Constant(warmup=100), Clock.UPDATES)

    def after(progress: Progress, num: int, samples: int, tokens: int) -> Progress:
        for _ in range(num):
            progress = progress.after(updated=True, samples=samples, tokens=tokens)
        return progress

    progress = after(Progress(), 10, 8, 100)
    schedule.count_by(Clock.SAMPLES, progress)  # 8 samples are an update
    progress = after(progress, 10, 16, 100)  # so these ten are worth twenty, and 50 tokens are worth one
    assert schedule.position(progress) == 10 + 20
    schedule.count_by(Clock.TOKENS, progress)
    assert schedule.position(progress) == 30
    progress = after(progress, 5, 16, 200)
    assert schedule.position(progress) == 30 + 5 * 200 / 50
    state = schedule.state_dict()
    schedule.count_by(Clock.TOKENS, progress)
    assert schedule.state_dict() == state, "counting by it already"
    fresh = ClockedSchedule(optimizer, Constant(warmup=100), Clock.UPDATES)
    fresh.load_state_dict(state)
    assert fresh.position(progress) == 50


def test_another_clock_starts_without_the_old_ones_exchange_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    before = ClockedSchedule(optimizer, Constant(warmup=100), Clock.UPDATES)
    progress = Progress().after(updated=True, samples=8, tokens=100)
    before.count_by(Clock.SAMPLES, progress)
    after = ClockedSchedule(optimizer, Constant(warmup=100), Clock.TOKENS, may_change=True)
    after.load_state_dict(before.state_dict())
    assert after.position(progress.after(updated=True, samples=8, tokens=50)) == 150


def test_the_saved_base_rate_is_the_one_that_goes_on() -> None:
    model, step = step_with(Constant(warmup=4), lr=0.5)
    rates(step, model, [[3]])
    model, resumed = step_with(Constant(warmup=4), lr=0.1)
    resumed.load_state_dict(step.state_dict())
    assert rates(resumed, model, [[3]]) == [0.25]
