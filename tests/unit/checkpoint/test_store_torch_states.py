"""The plain state of every optimizer and scheduler that torch ships survives the store exactly."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.storage.memory import Memory

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2}, "MultiStepLR": {"milestones": [1, 3, 3]}, "ConstantLR": {}, "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9}, "PolynomialLR": {}, "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3}, "ReduceLROnPlateau": {}, "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0}, "LambdaLR": {"lr_lambda": lambda n: 0.9**n},
    "MultiplicativeLR": {"lr_lambda": lambda n: 0.9},
}  # fmt: skip


def split(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """A state dict with its tensors taken out under their paths."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return None
    if isinstance(value, dict):
        return {key: split(item, tensors, f"{path}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(split(item, tensors, f"{path}.{i}") for i, item in enumerate(value))
    return value


def through_the_store(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    plain = split(state, tensors, "s")
    store = Store(Memory())
    entry = store.save({"x": Captured(plain=plain, tensors=tensors)}, Progress(), facts={}).result()
    with store.open(entry) as checkpoint:
        back = checkpoint.source("x").plain
        assert repr(back) == repr(plain)
        assert back == plain or "nan" in repr(plain)
        for key, tensor in tensors.items():
            target = torch.zeros_like(tensor)
            checkpoint.source("x").read_into(key, target)
            assert torch.equal(target, tensor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    kind = getattr(torch.optim, name)
    parameters = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(2, 2))]
    if name == "SparseAdam":
        optimizer = kind(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter).to_sparse()
        optimizer.step()
    elif name == "LBFGS":
        optimizer = kind(parameters)
        optimizer.step(lambda: sum((p**2).sum() for p in parameters).detach().requires_grad_())
    else:
        optimizer = kind(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    through_the_store(optimizer.state_dict())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name])
    for _ in range(4):
        optimizer.step()
        scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
    through_the_store(scheduler.state_dict())


def test_no_scheduler_of_torch_is_forgotten() -> None:
    shipped = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    composed = {"LRScheduler", "ChainedScheduler", "SequentialLR"}  # lists of the others
    assert shipped - composed == set(SCHEDULERS)


def test_composed_schedulers() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 2])]
    through_the_store(lr_scheduler.SequentialLR(optimizer, parts, milestones=[2]).state_dict())
    through_the_store(lr_scheduler.ChainedScheduler(parts, optimizer=optimizer).state_dict())
