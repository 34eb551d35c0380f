"""Who a run is: model shapes, data fingerprint, hyperparameters, the user's own arguments. Compared before any byte is
loaded; a difference is refused with both values, because a run that silently changed is the fault this project fights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from samerun.errors import UsageError
from samerun.run.config import RunConfig
from samerun.state import names

_SAMPLED_UPDATES: Final = (0, 1, 10, 100, 1000, 10_000)
"""Where a schedule given as a function is sampled: its code cannot be compared, its values can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    what: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.what}: saved {self.shown(self.saved)}, now {self.shown(self.now)}"

    @staticmethod
    def shown(value: Any) -> str:
        """Either value, cut to a line's length."""
        return _short(value)


def identity_of(config: RunConfig) -> dict[str, Any]:
    return {
        "model": model_identity(config.models),
        "data": config.source.identity(),
        "optimizer": {name: optimizer_identity(optimizer) for name, optimizer in config.optimizers.items()},
        "scheduler": {name: scheduler_identity(scheduler) for name, scheduler in config.schedulers.items()},
        "step": config.step.identity(),
        "user": user_identity(config.identity),
    }


def model_identity(models: Mapping[str, nn.Module]) -> dict[str, str]:
    return {
        name: f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
        for name, parameter in names.parameters(models).items()
    }


def optimizer_identity(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and group options as constructed, before anything was restored or scheduled."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        options["lr"] = group.get("initial_lr", group["lr"])
        groups.append({key: _plain(value) for key, value in sorted(options.items())})
    return {"class": type(optimizer).__name__, "groups": groups}


def scheduler_identity(scheduler: Any) -> dict[str, Any]:
    """Class and state as constructed; functions are represented by their values at a few updates."""
    state = {key: _plain(value) for key, value in sorted(scheduler.state_dict().items()) if key != "lr_lambdas"}
    if isinstance(scheduler, LambdaLR):
        state["lr_lambdas"] = [[_plain(f(update)) for update in _SAMPLED_UPDATES] for f in scheduler.lr_lambdas]
    return {"class": type(scheduler).__name__, "state": state}


def user_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(json.dumps(identity, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"identity= must be plain JSON values: {error}") from error
    assert isinstance(value, dict)
    return value


def differences(saved: Any, now: Any, *, what: str = "") -> list[Difference]:
    """Every leaf in which two identities differ, by path; lists are compared as wholes unless of tables."""
    if isinstance(saved, dict) and isinstance(now, dict):
        found = []
        for key in sorted(set(saved) | set(now)):
            found += differences(saved.get(key), now.get(key), what=f"{what}.{key}" if what else key)
        return found
    if _are_tables(saved) and _are_tables(now) and len(saved) == len(now):
        return [
            difference
            for position, (old, new) in enumerate(zip(saved, now, strict=True))
            for difference in differences(old, new, what=f"{what}[{position}]")
        ]
    return [] if saved == now else [Difference(what=what, saved=saved, now=now)]


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"
