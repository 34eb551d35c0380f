"""Identity: what makes two runs different runs is named by its path, with both values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from samerun.core.canonical import canonical_bytes
from samerun.errors import UsageError
from samerun.run.starting.identity import (
    differences,
    model_identity,
    optimizer_identity,
    scheduler_identity,
    user_identity,
)


def named(saved: Any, now: Any) -> list[str]:
    return [str(difference) for difference in differences(saved, now)]


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([nn.Parameter(torch.ones(2))], **options)


def test_models_differ_by_shape_dtype_and_name() -> None:
    base = model_identity({"m": nn.Linear(3, 2)})
    assert base == {"weight": "float32[2, 3]", "bias": "float32[2]"}
    assert named(base, model_identity({"m": nn.Linear(3, 2)})) == []
    assert named(base, model_identity({"m": nn.Linear(4, 2)})) == ['weight: saved "float32[2, 3]", now "float32[2, 4]"']
    assert named(base, model_identity({"m": nn.Linear(3, 2, dtype=torch.bfloat16)})) != []
    assert named(base, model_identity({"m": nn.Linear(3, 2, bias=False)})) == ['bias: saved "float32[2]", now nothing']


def test_wrapping_is_no_difference() -> None:
    model = nn.Linear(3, 2)
    assert model_identity({"m": torch.compile(model, backend="eager")}) == model_identity({"m": model})


def test_optimizers_differ_by_class_and_options() -> None:
    base = optimizer_identity(adam(lr=0.1))
    assert named(base, optimizer_identity(adam(lr=0.1))) == []
    assert named(base, optimizer_identity(adam(lr=0.2))) == ["groups[0].lr: saved 0.1, now 0.2"]
    assert named(base, optimizer_identity(adam(lr=0.1, betas=(0.9, 0.95)))) == [
        "groups[0].betas: saved [0.9, 0.999], now [0.9, 0.95]"
    ]
    assert "class: " in named(base, optimizer_identity(torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)))[0]


def test_a_learning_rate_that_a_schedule_moved_is_no_difference() -> None:
    optimizer = adam(lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    fresh = optimizer_identity(optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer_identity(optimizer) == fresh


def test_tensor_options_are_values() -> None:
    assert optimizer_identity(adam(lr=torch.tensor(0.5), foreach=False))["groups"][0]["lr"] == 0.5


def test_schedules_differ_by_class_and_numbers() -> None:
    base = scheduler_identity(lr_scheduler.StepLR(adam(), step_size=3))
    assert named(base, scheduler_identity(lr_scheduler.StepLR(adam(), step_size=3))) == []
    assert named(base, scheduler_identity(lr_scheduler.StepLR(adam(), step_size=4))) == [
        "state.step_size: saved 3, now 4"
    ]
    assert named(base, scheduler_identity(lr_scheduler.ConstantLR(adam()))) != []


def test_schedules_given_as_functions_are_compared_by_their_values() -> None:
    def of(function: Any) -> dict[str, Any]:
        return scheduler_identity(lr_scheduler.LambdaLR(adam(), function))

    assert of(lambda update: 1 / (1 + update)) == of(lambda update: (1 + update) ** -1)
    assert of(lambda update: 1 / (1 + update)) != of(lambda update: 1 / (2 + update))
    assert of(lambda update: 1.0) != of(lambda update: 1.0 if update < 1000 else 0.5)


SCHEDULES = [
    lambda o: lr_scheduler.ReduceLROnPlateau(o),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    lambda o: lr_scheduler.LambdaLR(o, lambda update: math.inf),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_every_identity_is_canonical_json_and_the_same_twice(make: Any) -> None:
    one, other = (scheduler_identity(make(adam())) for _ in range(2))
    assert canonical_bytes(one) == canonical_bytes(other)


def test_user_identity_is_plain_json() -> None:
    assert user_identity({"a": [1, (2, 3)], "b": {"c": None}}) == {"a": [1, [2, 3]], "b": {"c": None}}
    for bad in ({"a": math.nan}, {"a": object()}, {"a": {1, 2}}):
        with pytest.raises(UsageError, match="identity= must be plain JSON values"):
            user_identity(bad)


def test_differences_are_leaves_by_path() -> None:
    saved = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": 1}, {"e": 2}], "f": "x"}
    now = {"a": {"b": 2, "c": [1, 3]}, "d": [{"e": 1}, {"e": 3}], "g": "x"}
    assert named(saved, now) == [
        "a.b: saved 1, now 2",
        "a.c: saved [1, 2], now [1, 3]",
        "d[1].e: saved 2, now 3",
        'f: saved "x", now nothing',
        'g: saved nothing, now "x"',
    ]
    assert named([{"a": 1}], [{"a": 1}, {"a": 2}]) == [': saved [{"a": 1}], now [{"a": 1}, {"a": 2}]']
    assert len(named({"a": "x" * 500}, {"a": "y"})[0]) < 120


def test_a_missing_record_differs_from_everything() -> None:
    assert named(None, {"a": 1}) != []
