"""What is trained, by what, at which rates: the objects a user hands over, checked once, before anything happens.

Models, optimizers and schedulers are mutable objects that know little of each other. Each check here is a training that
would otherwise run and be wrong in silence, or die in the middle of its first window.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samerun.errors import UsageError
from samerun.state import names
from samerun.state.optimizer import named_groups
from samerun.step.schedule import Clock, clocked


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParts:
    """One object of each kind, or several by name."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    schedulers: Mapping[str, Any]
    """Curves are bound to their optimizers and the clock."""

    @classmethod
    def of(cls, model: Any, optimizer: Any, scheduler: Any, clock: Clock, *, may_change: bool = False) -> TrainedParts:
        """From a user's arguments. Raises UsageError for what cannot be trained together."""
        models, optimizers = by_name(model), by_name(optimizer)
        _check_kinds(models, optimizers)
        _check_owners(models, optimizers)
        _check_devices(models, optimizers)
        for name, one in optimizers.items():
            _check_steps_alone(one)
            _check_trains(name, one)
        given = by_name(scheduler) if scheduler is not None else {}
        schedulers = clocked(optimizers, given, clock, may_change=may_change)
        _check_schedulers(schedulers, optimizers)
        return cls(models=models, optimizers=optimizers, schedulers=schedulers)

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are; it was checked that they are in one place."""
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        device = next(parameter.device for group in groups for parameter in group["params"])
        assert isinstance(device, torch.device)
        return device

    @property
    def device_types(self) -> frozenset[str]:
        """Where forwards may want their batches: where weights and buffers lie, and where shards are moved to."""
        found = set()
        for model in self.models.values():
            for tensor in (*model.parameters(), *model.buffers()):
                found.add(tensor.device.type)
                if isinstance(tensor, DTensor):
                    found.add(tensor.device_mesh.device_type)
        return frozenset(found)


def by_name(value: Any) -> dict[str, Any]:
    """One object, or several by name."""
    return dict(value) if isinstance(value, Mapping) else {"model": value}


def _check_kinds(models: Mapping[str, Any], optimizers: Mapping[str, Any]) -> None:
    for what, given in (("model", models), ("optimizer", optimizers)):
        if not given:
            raise UsageError(f"{what}={{}} is empty; give one {what}, or several by name")
        for name, value in given.items():
            if not isinstance(name, str):
                raise UsageError(f"{what}={{{name!r}: …}}: names are texts; write {str(name)!r}")
            if what == "model" and not isinstance(value, nn.Module):
                raise UsageError(f"model= got a {type(value).__name__}, not an nn.Module")
            if what == "optimizer" and not (hasattr(value, "param_groups") and callable(getattr(value, "step", None))):
                raise UsageError(
                    f"optimizer= got a {type(value).__name__}; give a torch.optim.Optimizer, or a dict of them by name"
                )


def _check_owners(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Each parameter belongs to a model that was given, and to one optimizer."""
    owners: dict[int, str] = {}
    for which, optimizer in optimizers.items():
        for name, parameter in _parameters(models, which, optimizer).items():
            other = owners.setdefault(id(parameter), which)
            if other != which:
                raise UsageError(
                    f"the optimizers {other!r} and {which!r} share the parameter {name} of shape "
                    f"{tuple(parameter.shape)}: whose loss would train it? Give each parameter to one optimizer"
                )


def _parameters(
    models: Mapping[str, nn.Module], which: str, optimizer: torch.optim.Optimizer
) -> dict[str, nn.Parameter]:
    return {name: one for group in named_groups(optimizer, models, which=which) for name, one in group.items()}


def _check_devices(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """A window sums losses and norms in one place, and what has no bytes cannot be saved."""
    for name, parameter in names.parameters(models).items():
        if parameter.is_meta:
            raise UsageError(
                f"the parameter {name} is on the device 'meta', where it holds nothing: give it a place and values "
                f"(model.to_empty(device=…) and an initialization) before the optimizer is made"
            )
    homes: dict[torch.device, str] = {}
    for which, optimizer in optimizers.items():
        for name, parameter in _parameters(models, which, optimizer).items():
            homes.setdefault(parameter.device, name)
    if len(homes) > 1:
        places = ", ".join(f"{name} on '{device}'" for device, name in homes.items())
        raise UsageError(
            f"the trained parameters lie on {len(homes)} devices: {places}; move the model to one of them before the "
            f"optimizer is made, or shard it with fully_shard"
        )


def _check_trains(name: str, optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"optimizer {name}: none of its {len(parameters)} parameters is trained (requires_grad is False "
            f"everywhere); unfreeze some before the run starts"
        )
    for number, group in enumerate(optimizer.param_groups):
        rate = float(group.get("lr", 0.0))
        if not 0 <= rate < math.inf:
            raise UsageError(f"optimizer {name}: group {number} has lr={rate}; it must be finite, 0 or more")


def _check_steps_alone(optimizer: torch.optim.Optimizer) -> None:
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [
        argument.name
        for argument in arguments
        if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
    ]
    if required:
        raise UsageError(
            f"{type(optimizer).__name__}.step() needs {', '.join(required)}: it evaluates the loss several times, "
            f"and a window has one backward for each batch; use an optimizer whose step() takes nothing"
        )


def _check_schedulers(schedulers: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """A scheduler sets the rates of the optimizer that it was made of; another's would go on without it."""
    for name, scheduler in schedulers.items():
        target = getattr(scheduler, "optimizer", None)
        if target is None:
            continue
        groups = getattr(target, "param_groups", None)  # the same list behind a wrapper of the optimizer, too
        owner = next((which for which, optimizer in optimizers.items() if optimizer.param_groups is groups), None)
        made = f"scheduler {name}: this {type(scheduler).__name__} was made for"
        if owner is None:
            raise UsageError(f"{made} another optimizer than those of this run, {sorted(optimizers)}; make it anew")
        if name in optimizers and owner != name:
            raise UsageError(f"{made} the optimizer {owner!r}, not for {name!r}; give it under that name")
