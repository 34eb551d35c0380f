"""The contract of a component of the user's own, asked of real ones and of broken ones that it must catch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from samerun.errors import UsageError
from samerun.testing import check_component

torch.set_num_threads(1)


class EMA:
    """Averaged weights with a count of their own, made at the first update."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.averaged: dict[str, torch.Tensor] = {}
        self.num_updates = 0

    def update(self) -> None:
        self.num_updates += 1
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.add_(1.0 / self.num_updates)
                kept = self.averaged.setdefault(name, value.detach().clone())
                kept.lerp_(value, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"averaged": dict(self.averaged), "num_updates": self.num_updates, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaged = {name: value.clone() for name, value in state["averaged"].items()}
        self.num_updates = state["num_updates"]
        self.model.load_state_dict(state["model"])


class StartsItsCountAnew(EMA):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_updates = 0


class LeavesItsCountOut(EMA):
    """Bitwise right after the restore, and another from the next update on."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "num_updates"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "num_updates": 0})


class AddsToWhatItHas(EMA):
    """Right in a fresh one; in one that was used before, what was there stays."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = dict(self.averaged)
        super().load_state_dict(state)
        self.averaged = {**self.averaged, **mine}


class NeedsWhatItMakesLater(EMA):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        averaged, made = state["averaged"], self.averaged
        super().load_state_dict({**state, "averaged": {}})
        for name, value in averaged.items():
            self.averaged[name] = made[name].copy_(value)


class HoldsAnObject(EMA):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "source": self.model}


class DrawsWhenItChanges(EMA):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator()
        self.noise.seed()

    def update(self) -> None:
        super().update()
        self.averaged["weight"].add_(torch.rand((), generator=self.noise))


BROKEN: dict[type[EMA], str] = {
    StartsItsCountAnew: "saved after 1 changes and restored into a fresh one: num_updates came back as something else",
    LeavesItsCountOut: "restored into a fresh one: after one more change averaged.bias, averaged.weight, model.bias, …",
    AddsToWhatItHas: "restored into one that was used before: averaged",
    NeedsWhatItMakesLater: "saved after 1 changes and restored into a fresh one: KeyError: 'weight'",
    HoldsAnObject: "state_dict() cannot be saved: source: a torch.nn.modules.linear.Linear",
    DrawsWhenItChanges: "there is no twin to compare with",
}


def test_an_average_of_weights_keeps_the_contract() -> None:
    before = torch.get_rng_state()
    assert check_component(EMA, EMA.update) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_keeps_it() -> None:
    def train(model: nn.Module) -> None:
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(0.5)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert check_component(lambda: copy.deepcopy(model), train) == []


def test_a_scheduler_without_its_optimizer_is_only_half_of_one() -> None:
    """torch's goes on from the rate that the optimizer holds: why `Run` restores both."""

    def scheduler() -> torch.optim.lr_scheduler.CosineAnnealingLR:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)

    problems = check_component(scheduler, lambda one: (one.optimizer.step(), one.step()))
    assert len(problems) == 1 and "after one more change _last_lr is not the twin's" in problems[0]


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_each_kind_of_fault_is_named(kind: type[EMA]) -> None:
    problems = check_component(kind, kind.update)
    assert len(problems) == 1 and BROKEN[kind] in problems[0], problems


def test_a_change_that_changes_nothing_tells_nothing() -> None:
    with pytest.raises(UsageError, match="changed nothing"):
        check_component(EMA, lambda ema: None)
    with pytest.raises(UsageError, match="at least 1"):
        check_component(EMA, EMA.update, changes=0)
