"""Component `scheduler`: the learning rate's past and present.

Holds every scheduler's own state and every parameter group's current options (lr, betas, weight decay, …), so a run
without a scheduler keeps its learning rate too. Membership of the groups is recorded by parameter name and checked.

An optimizer passes over frozen members, so they are recorded twice: as the program began, where a program that begins
otherwise would train another model and is refused, and as of the save, which comes back: what a loop has thawed stays
thawed, and what it freezes for half a window (a GAN's critic) is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from samerun.core.component import Captured, Plain, Source
from samerun.errors import MismatchError
from samerun.state.optimizer import named_groups
from samerun.state.tree import join_tree, split_tree


class SchedulerLike(Protocol):
    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class Schedule:
    name = "scheduler"

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Mapping[str, SchedulerLike],
        models: Mapping[str, nn.Module],
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._models = models
        self._first_frozen = {which: self._frozen(which) for which in optimizers}

    def capture(self) -> Captured:
        plain, tensors = split_tree(
            {
                "groups": {which: self._options(which) for which in self._optimizers},
                "members": {which: self._members(which) for which in self._optimizers},
                "frozen": {which: [self._first_frozen[which], self._frozen(which)] for which in self._optimizers},
                "schedulers": {which: scheduler.state_dict() for which, scheduler in self._schedulers.items()},
            },
            path="",
        )
        return Captured(plain=plain, tensors=tensors)

    def restore(self, source: Source) -> None:
        def load(key: str, host: bool) -> torch.Tensor:
            spec = source.specs[key]
            target = torch.zeros(spec.shape, dtype=spec.dtype)
            source.read_into(key, target)
            return target

        state = join_tree(source.plain, load)
        if not isinstance(state, dict) or set(state) | {"frozen"} != {"groups", "members", "frozen", "schedulers"}:
            raise MismatchError("scheduler: the checkpoint's entry is not a table of groups, members and schedulers")
        for what, live in (("groups", self._optimizers), ("schedulers", self._schedulers)):
            if set(state[what]) != set(live):
                raise MismatchError(
                    f"scheduler: {what} saved for {sorted(state[what])}, the program has {sorted(live)}"
                )
        for which, optimizer in self._optimizers.items():
            if state["members"][which] != self._members(which):
                raise MismatchError(
                    f"scheduler: optimizer {which} had {_sizes(state['members'][which])} parameters in its groups, "
                    f"the program has {_sizes(self._members(which))}, or others by name"
                )
            if "frozen" in state:  # not in checkpoints from before it was recorded
                self._restore_frozen(which, *state["frozen"][which])
            for group, options in zip(optimizer.param_groups, state["groups"][which], strict=True):
                _apply(group, options)
        for which, scheduler in self._schedulers.items():
            scheduler.load_state_dict(state["schedulers"][which])

    def _restore_frozen(self, which: str, first: list[str], saved: list[str]) -> None:
        """The program may begin as the run did, or as the last edge left it in this very process."""
        now = self._frozen(which)
        if now not in (first, saved):
            changed = [f"{name} was frozen and is not" for name in first if name not in now]
            changed += [f"{name} is frozen and was not" for name in now if name not in first]
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            raise MismatchError(
                f"scheduler: optimizer {which} would train other parameters: {', '.join(changed[:4])}{more}; set "
                f"requires_grad as it was when the run began"
            )
        self._first_frozen[which] = first
        for group in named_groups(self._optimizers[which], self._models, which=which):
            for name, parameter in group.items():
                parameter.requires_grad_(name not in saved)

    def _options(self, which: str) -> list[dict[str, Plain]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizers[which].param_groups
        ]

    def _members(self, which: str) -> list[list[str]]:
        return [sorted(group) for group in named_groups(self._optimizers[which], self._models, which=which)]

    def _frozen(self, which: str) -> list[str]:
        return sorted(
            name
            for group in named_groups(self._optimizers[which], self._models, which=which)
            for name, parameter in group.items()
            if not parameter.requires_grad
        )


def _apply(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _sizes(members: list[list[str]]) -> list[int]:
    return [len(group) for group in members]
