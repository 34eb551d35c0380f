"""A state that is loaded under another batch, curve or clock: said and told before and after, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samerun.core.progress import Progress
from samerun.errors import MismatchError, UsageError
from samerun.step import Step
from samerun.step.schedule import Clock, WarmupCosine, WarmupLinear
from samerun.step.schedule.remap import remap_loaded

BASE = 0.5
CURVE = WarmupLinear(warmup=8, total=60)


def make(*, batch: int | None = 4, scheduler: Any = CURVE, **options: Any) -> Step:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE)
    scheduler = scheduler(optimizer) if isinstance(scheduler, type(make)) else scheduler
    return Step(model, optimizer, scheduler=scheduler, global_batch=batch, **options)


def rates(step: Step, num_updates: int, *, batch: int = 4) -> list[float]:
    """The rate inside each update of windows of two microbatches, 5 tokens a sample."""
    found = []
    for _ in range(num_updates):
        window = step.window([torch.ones(batch // 2, 3)] * 2, num_samples=[batch // 2] * 2)
        for inputs in window:
            model = step._engine.models["model"]
            window.backward(model(inputs).sum() * 1e-3, 5 * len(inputs))
        found.append(window.step().lr)
    return found


def saved(num_updates: int = 3, **options: Any) -> dict[str, Any]:
    step = make(**options)
    rates(step, num_updates, batch=options.get("batch") or 4)
    return step.state_dict()


def expected(curve: Any, positions: list[float]) -> list[float]:
    return [BASE * curve.factor(position) for position in positions]


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)


def test_the_same_batch_and_curve_go_on() -> None:
    step = make()
    step.load_state_dict(saved(), remap="samples")
    assert step.remapped == [] and rates(step, 2) == expected(CURVE, [4, 5])


def test_another_batch_is_refused_with_both_and_changes_nothing() -> None:
    step = make(batch=8)
    before = step.state_dict()
    with pytest.raises(UsageError, match=r"global_batch was 4 and is now 8.*3 done, 12 samples.*remap='updates'"):
        step.load_state_dict(saved())
    assert step.state_dict() == before
    with pytest.raises(UsageError, match=r"saved with global_batch=4, and this step was not told any"):
        make(batch=None).load_state_dict(saved())


@pytest.mark.parametrize(("remap", "gained"), [("updates", 1.0), ("samples", 2.0), ("tokens", 2.0)])
def test_milestones_stay_where_the_user_wants_them(
    capfd: pytest.CaptureFixture[str], remap: str, gained: float
) -> None:
    """Twice the batch: an update is worth one update, or two of the old in data. Also after a second load."""
    step = make(batch=8)
    step.load_state_dict(saved(), remap=remap)
    told = capfd.readouterr().err
    assert f"global_batch was 4 and is now 8; milestones stay at the same {remap}: was WarmupLinear" in told
    assert [f"samerun: {line}" for line in step.remapped] == told.splitlines()
    assert rates(step, 2, batch=8) == expected(CURVE, [3 + gained, 3 + 2 * gained])
    again = make(batch=8)
    again.load_state_dict(step.state_dict())
    assert again.remapped == [] and rates(again, 1, batch=8) == expected(CURVE, [3 + 3 * gained])


def test_a_curve_on_a_data_clock_goes_on_by_itself() -> None:
    curve = WarmupCosine(warmup=10, total=100)
    step = make(batch=8, scheduler=curve, clock="samples")
    step.load_state_dict(saved(scheduler=curve, clock="samples"))
    assert rates(step, 2, batch=8) == expected(curve, [20, 28])


def test_another_curve_or_clock_is_taken_when_it_is_meant(capfd: pytest.CaptureFixture[str]) -> None:
    longer = WarmupLinear(warmup=8, total=90)
    step = make(scheduler=longer)
    with pytest.raises(MismatchError, match=r"curve was .*'total': 60.*is .*'total': 90"):
        step.load_state_dict(saved())
    step.load_state_dict(saved(), remap="updates")
    assert "was WarmupLinear(warmup=8, total=60, final=0.0) on updates" in capfd.readouterr().err
    assert rates(step, 2) == expected(longer, [4, 5])
    other = make(clock="tokens")
    with pytest.raises(MismatchError, match=r"clock was updates, is tokens"):
        other.load_state_dict(saved())
    other.load_state_dict(saved(), remap="tokens")
    assert rates(other, 1) == expected(CURVE, [80])


def test_a_torch_scheduler_counts_its_own_steps() -> None:
    state = saved(scheduler=step_lr)
    with pytest.raises(UsageError, match="counts updates"):
        make(batch=8, scheduler=step_lr).load_state_dict(state)
    with pytest.raises(UsageError, match=r"StepLR counts its own steps.*remap='updates'"):
        make(batch=8, scheduler=step_lr).load_state_dict(state, remap="samples")
    step = make(batch=8, scheduler=step_lr)
    step.load_state_dict(state, remap="updates")
    assert "StepLR goes on" in step.remapped[0]


def test_other_schedulers_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"schedulers \['model'\], this step has \[\]"):
        make(scheduler=None).load_state_dict(saved())
    with pytest.raises(UsageError, match="'epochs' is unknown"):
        make().load_state_dict(saved(), remap="epochs")
    with pytest.raises(UsageError, match=r"global_batch=0 must be at least 1"):
        make(batch=0)


def test_a_state_from_before_the_batch_was_said_goes_on() -> None:
    step = make()
    step.load_state_dict(saved(batch=None))
    assert step.remapped == [] and rates(step, 1) == expected(CURVE, [4])


def test_a_plateau_scheduler_counts_metrics_and_needs_no_choice() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = {"model": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}
    for remap in (None, Clock.SAMPLES):
        assert remap_loaded(plateau, Progress(), remap=remap, batch="global_batch was 8 and is now 16") == []
    steps = {"model": torch.optim.lr_scheduler.StepLR(optimizer, 3)}
    with pytest.raises(UsageError, match="Say which is meant"):
        remap_loaded(steps, Progress(), remap=None, batch="global_batch was 8 and is now 16")
