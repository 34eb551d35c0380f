"""Every schedule of torch: capture → save → load into fresh objects → the same learning rates from there on."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as L  # noqa: N812  # the table below is read column by column
from torch.optim.swa_utils import SWALR

from samerun.checkpoint import Store
from samerun.core.progress import Progress
from samerun.errors import MismatchError
from samerun.state.schedule import Schedule
from samerun.storage.memory import Memory

Make = Callable[[torch.optim.Optimizer], Any]


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [L.ConstantLR(optimizer, factor=0.1, total_iters=3), L.ExponentialLR(optimizer, gamma=0.9)]
    return L.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    parts = [L.LinearLR(optimizer, total_iters=4), L.MultiStepLR(optimizer, milestones=[2, 2, 5])]
    return L.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o: L.LambdaLR(o, lambda update: 1.0 / (1 + update)),
    "MultiplicativeLR": lambda o: L.MultiplicativeLR(o, lambda update: 0.9),
    "StepLR": lambda o: L.StepLR(o, step_size=3),
    "MultiStepLR": lambda o: L.MultiStepLR(o, milestones=[2, 5, 5, 7]),
    "ConstantLR": lambda o: L.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: L.LinearLR(o, total_iters=7),
    "ExponentialLR": lambda o: L.ExponentialLR(o, gamma=0.97),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o: L.PolynomialLR(o, total_iters=9, power=2.0),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, T_max=7),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: L.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "CyclicLR": lambda o: L.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2, mode="triangular2"),
    "CyclicLR-exp": lambda o: L.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: L.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "OneCycleLR-linear": lambda o: L.OneCycleLR(o, max_lr=0.1, total_steps=20, anneal_strategy="linear"),
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=5),
}

LOSSES = (3.0, 2.0, 2.0, 2.5, 2.5, 2.5, 1.0, 1.0, 1.5, 1.5, 1.5, 1.5)


def build(case: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}], lr=0.1, momentum=0.9)
    return model, optimizer, SCHEDULES[case](optimizer)


def advance(optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> list[Any]:
    """One update; returns everything that the schedule may move."""
    optimizer.step()
    if isinstance(scheduler, L.ReduceLROnPlateau):
        scheduler.step(LOSSES[number % len(LOSSES)])
    else:
        scheduler.step()
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def carry_over(source: Schedule, target: Schedule) -> None:
    store = Store(Memory())
    store.save({"scheduler": source.capture()}, Progress(), facts={}).result()
    with store.open(store.catalog().entries[0]) as checkpoint:
        target.restore(checkpoint.source("scheduler"))
        assert checkpoint.unconsumed() == []


def test_no_schedule_of_torch_is_missing() -> None:
    public = {name for name in L.__all__ if inspect.isclass(getattr(L, name))}
    assert public - {"LRScheduler"} <= {case.split("-")[0] for case in SCHEDULES}


@pytest.mark.parametrize("case", SCHEDULES)
@pytest.mark.parametrize("num_before", [0, 1, 4, 6])
def test_the_next_learning_rates_are_the_same_bits(case: str, num_before: int) -> None:
    model, optimizer, scheduler = build(case)
    for number in range(num_before):
        advance(optimizer, scheduler, number)
    fresh, fresh_optimizer, fresh_scheduler = build(case)
    saved, live = (
        Schedule({"o": o}, {"s": s}, {"m": m})
        for m, o, s in ((model, optimizer, scheduler), (fresh, fresh_optimizer, fresh_scheduler))
    )
    carry_over(saved, live)
    assert fresh_scheduler.state_dict() == scheduler.state_dict()
    assert fresh_scheduler.get_last_lr() == scheduler.get_last_lr()
    for number in range(num_before, num_before + 5):
        assert advance(fresh_optimizer, fresh_scheduler, number) == advance(optimizer, scheduler, number)


def test_control_a_schedule_that_starts_again_is_noticed() -> None:
    _, optimizer, scheduler = build("CosineAnnealingLR")
    for number in range(3):
        advance(optimizer, scheduler, number)
    _, fresh_optimizer, fresh_scheduler = build("CosineAnnealingLR")
    assert advance(fresh_optimizer, fresh_scheduler, 3) != advance(optimizer, scheduler, 3)


def test_milestones_come_back_as_a_counter_with_integer_keys() -> None:
    model, optimizer, scheduler = build("MultiStepLR")
    fresh, fresh_optimizer, fresh_scheduler = build("MultiStepLR")
    fresh_scheduler.milestones = Counter()
    carry_over(
        Schedule({"o": optimizer}, {"s": scheduler}, {"m": model}),
        Schedule({"o": fresh_optimizer}, {"s": fresh_scheduler}, {"m": fresh}),
    )
    assert type(fresh_scheduler.milestones) is Counter
    assert fresh_scheduler.milestones == Counter({2: 1, 5: 2, 7: 1})


def test_a_learning_rate_without_a_schedule_is_kept() -> None:
    model, optimizer, _ = build("ConstantLR")
    optimizer.param_groups[1]["lr"] = 0.0625  # set by hand, as people do
    fresh, fresh_optimizer, _ = build("ConstantLR")
    carry_over(Schedule({"o": optimizer}, {}, {"m": model}), Schedule({"o": fresh_optimizer}, {}, {"m": fresh}))
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert fresh_optimizer.param_groups[1]["lr"] == 0.0625


def test_other_groups_are_refused_with_their_sizes() -> None:
    model, optimizer, _ = build("ConstantLR")
    fresh = nn.Linear(3, 2)
    one_group = torch.optim.SGD(fresh.parameters(), lr=0.1)
    with pytest.raises(
        MismatchError, match=r"optimizer o had \[1, 1\] parameters in its groups, the program has \[2\]"
    ):
        carry_over(Schedule({"o": optimizer}, {}, {"m": model}), Schedule({"o": one_group}, {}, {"m": fresh}))


def freezing(*, frozen: bool) -> tuple[Schedule, nn.Parameter]:
    model, optimizer, _ = build("ConstantLR")
    model.bias.requires_grad_(not frozen)
    return Schedule({"o": optimizer}, {}, {"m": model}), model.bias


def test_other_frozen_parameters_are_refused_by_name_in_both_directions() -> None:
    with pytest.raises(MismatchError, match="would train other parameters: bias was frozen and is not; set"):
        carry_over(freezing(frozen=True)[0], freezing(frozen=False)[0])
    with pytest.raises(MismatchError, match="would train other parameters: bias is frozen and was not; set"):
        carry_over(freezing(frozen=False)[0], freezing(frozen=True)[0])


@pytest.mark.parametrize("first", [True, False])
def test_what_was_frozen_or_thawed_meanwhile_comes_back_as_it_was(first: bool) -> None:
    """Into a fresh program and into the one that was just left; from either, into a fresh one again."""
    saved, bias = freezing(frozen=first)
    bias.requires_grad_(first)
    for begins in (first, not first):
        live, other = freezing(frozen=begins)
        carry_over(saved, live)
        assert other.requires_grad is first
        again, third = freezing(frozen=first)
        carry_over(live, again)
        assert third.requires_grad is first


def test_a_checkpoint_that_does_not_say_what_was_frozen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = build("ConstantLR")
    model.bias.requires_grad_(False)
    source = Schedule({"o": optimizer}, {}, {"m": model})
    captured = source.capture()
    assert isinstance(captured.plain, dict) and captured.plain.pop("frozen") == {"o": [["bias"], ["bias"]]}
    monkeypatch.setattr(source, "capture", lambda: captured)
    carry_over(source, Schedule({"o": optimizer}, {}, {"m": model}))


def test_a_missing_schedule_is_refused_by_name() -> None:
    model, optimizer, scheduler = build("StepLR")
    fresh, fresh_optimizer, _ = build("StepLR")
    with pytest.raises(MismatchError, match=r"schedulers saved for \['s'\], the program has \[\]"):
        carry_over(
            Schedule({"o": optimizer}, {"s": scheduler}, {"m": model}),
            Schedule({"o": fresh_optimizer}, {}, {"m": fresh}),
        )
