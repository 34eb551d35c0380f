"""Components `moments` and `steps`: what the optimizers remember, by parameter name.

State is bound to the parameter's name, never to its position in a list, and keeps its own dtype (fp32 moments of bf16
parameters stay fp32). Any optimizer works whose state is made of tensors and plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from samerun.core.component import Captured, Plain, Source
from samerun.errors import MismatchError, UsageError
from samerun.state import names
from samerun.state.checks import require_same_names
from samerun.state.tree import join_tree, split_tree

_STEP: Final = "step"
_OWN: Final = "(the optimizer's own)"
"""In a parameter's place: what its state_dict holds besides the state of parameters and the groups."""


def named_groups(
    optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module], *, which: str
) -> list[dict[str, nn.Parameter]]:
    """The optimizer's parameter groups by parameter name. Raises UsageError for a parameter outside the models."""
    by_identity = {id(parameter): name for name, parameter in names.parameters(models).items()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        named = {}
        for parameter in group["params"]:
            if id(parameter) not in by_identity:
                raise UsageError(
                    f"optimizer {which}: group {number} holds a parameter of shape {tuple(parameter.shape)} that no "
                    f"model given here owns; pass every trained model, and build the optimizer after wrapping (FSDP2)"
                )
            named[by_identity[id(parameter)]] = parameter
        groups.append(named)
    return groups


class OptimizerMemory:
    """One half of every optimizer's state: its step counters, or everything else."""

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], models: Mapping[str, nn.Module], *, steps: bool
    ) -> None:
        self.name = "steps" if steps else "moments"
        self._optimizers = optimizers
        self._models = models
        self._steps = steps

    def capture(self) -> Captured:
        plain: dict[str | int, Plain] = {}
        tensors: dict[str, torch.Tensor] = {}
        for which, optimizer in self._optimizers.items():
            for name, parameter in self._parameters(which).items():
                mine = {key: value for key, value in optimizer.state.get(parameter, {}).items() if self._owns(key)}
                if mine:
                    path = self._path(which, name)
                    plain[path], found = split_tree(mine, path=path, home=parameter.device)
                    tensors.update(found)
            own = {} if self._steps else own_state(optimizer)
            if own:
                path = self._path(which, _OWN)
                plain[path], found = split_tree(own, path=path)
                tensors.update(found)
        return Captured(plain=plain, tensors=tensors)

    def restore(self, source: Source) -> None:
        saved = source.plain
        if not isinstance(saved, dict):
            raise MismatchError(f"{self.name}: expected a table by parameter name, found {type(saved).__name__}")
        live = {
            self._path(which, name): (optimizer, parameter)
            for which, optimizer in self._optimizers.items()
            for name, parameter in self._parameters(which).items()
        }
        owns = {self._path(which, _OWN): optimizer for which, optimizer in self._optimizers.items()}
        if unknown := set(map(str, saved)) - set(live) - set(owns):
            require_same_names(self.name, saved=unknown, live=())
        for path, (optimizer, parameter) in live.items():
            kept = {key: value for key, value in optimizer.state.get(parameter, {}).items() if not self._owns(key)}
            home = _step_device(optimizer, parameter) if self._steps else parameter.device
            mine = _restored(source, saved[path], parameter, home) if path in saved else {}
            if kept or mine:
                optimizer.state[parameter] = {**kept, **mine}
            else:
                optimizer.state.pop(parameter, None)
        for path, optimizer in owns.items() if not self._steps else ():
            self._restore_own(optimizer, _tree(source, saved[path]) if path in saved else {})

    def forget(self, source: Source) -> None:
        """As if this half had never been saved: zeros of the saved shapes. For drills that leave it out on purpose."""
        self.restore(source)
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                for key, value in state.items():
                    if self._owns(key) and isinstance(value, torch.Tensor):
                        value.zero_()

    def _restore_own(self, optimizer: torch.optim.Optimizer, own: dict[str, Any]) -> None:
        """Through the optimizer's load_state_dict, the only door there is; what torch's part of that does is undone."""
        now = own_state(optimizer)
        if now.keys() != own.keys():
            require_same_names(f"{self.name}: {type(optimizer).__name__}.state_dict()", saved=own, live=now)
        if own:
            state = dict(optimizer.state)  # load_state_dict copies it, and casts moments to the parameters' dtype
            optimizer.load_state_dict({**optimizer.state_dict(), **own})
            optimizer.state.update(state)

    def _parameters(self, which: str) -> dict[str, nn.Parameter]:
        groups = named_groups(self._optimizers[which], self._models, which=which)
        return {name: parameter for group in groups for name, parameter in group.items()}

    def _path(self, which: str, name: str) -> str:
        return name if len(self._optimizers) == 1 else f"{which}/{name}"

    def _owns(self, key: Any) -> bool:
        return (key == _STEP) is self._steps


def own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer's own `state_dict` holds besides torch's two tables."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}


def _tree(source: Source, saved: Plain) -> dict[str, Any]:
    def load(key: str, host: bool) -> torch.Tensor:
        target = torch.zeros(source.specs[key].shape, dtype=source.specs[key].dtype)
        source.read_into(key, target)
        return target

    tree = join_tree(saved, load)
    assert isinstance(tree, dict)
    return tree


def _restored(source: Source, saved: Plain, parameter: nn.Parameter, home: torch.device) -> dict[str, Any]:
    def load(key: str, host: bool) -> torch.Tensor:
        if key not in source.specs:
            raise MismatchError(f"optimizer state: the checkpoint names {key} but holds no tensor of that name")
        spec = source.specs[key]
        if spec.shape == tuple(parameter.shape) and not host and home == parameter.device:
            # zeros_like keeps a DTensor's mesh and placements, and the memory format
            target: torch.Tensor = torch.zeros_like(parameter, dtype=spec.dtype, requires_grad=False)
        else:
            target = torch.zeros(spec.shape, dtype=spec.dtype, device="cpu" if host else home)
        source.read_into(key, target)
        return target

    state = join_tree(saved, load)
    assert isinstance(state, dict)
    return state


def _step_device(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.device:
    """Where torch keeps step counters: beside the parameter for fused and capturable groups, else on the host."""
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            beside = group.get("capturable") or group.get("fused")
            return parameter.device if beside else torch.device("cpu")
    raise AssertionError("the parameter belongs to none of the optimizer's groups")
