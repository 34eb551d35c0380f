from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from samerun.health.nonfinite import Culprit, InputKeeper, Place, find_non_finite


class Divides(nn.Module):
    """Finite in, not finite out, where `by` is 0."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.by


class Root(nn.Module):
    """sqrt(|x|) has an infinite gradient at 0 and a finite value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt()


def net(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(13, 7), middle or nn.Tanh())
    return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Dropout(0.2), inner, nn.Linear(7, 1))


def culprit(model: nn.Module, x: torch.Tensor, *, backward: bool = False) -> Culprit | None:
    def once() -> None:
        out = model(x)
        if backward:
            out.sum().backward()

    return find_non_finite({"model": model}, once)


BATCH = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


def test_a_sound_model_accuses_nobody() -> None:
    assert culprit(net(), BATCH, backward=True) is None


def test_the_module_that_made_it_is_named_not_those_it_passed_through() -> None:
    found = culprit(net(Divides(0.0)), BATCH)
    assert found is not None
    assert (found.place, found.name, found.kind) == (Place.OUTPUT, "3.1", "Divides")
    assert found.num_nan + found.num_inf == found.num_elements == 35


def poison_parameter(model: nn.Sequential) -> None:
    model[4].weight.data[0, 3] = float("nan")


def poison_buffer(model: nn.Sequential) -> None:
    model[1].running_var[2] = float("inf")


@pytest.mark.parametrize(
    ("poison", "place", "name"),
    [(poison_parameter, Place.PARAMETER, "4.weight"), (poison_buffer, Place.BUFFER, "1.running_var")],
)
def test_state_that_is_bad_already_is_named_before_any_replay(
    poison: Callable[[nn.Sequential], None], place: Place, name: str
) -> None:
    model = net()
    poison(model)
    found = find_non_finite({"model": model}, lambda: pytest.fail("no replay is needed"))
    assert found is not None
    assert (found.place, found.name) == (place, name)
    assert found.num_nan + found.num_inf == 1


def test_a_bad_batch_is_the_batchs_fault() -> None:
    bad = BATCH.clone()
    bad[2, 1] = float("inf")
    found = culprit(net(), bad)
    assert found is not None
    assert (found.place, found.num_inf, found.num_elements) == (Place.INPUT, 1, 35)


def test_a_gradient_that_bursts_behind_a_finite_forward_is_found() -> None:
    model = nn.Sequential(nn.Linear(7, 7), Root())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    assert culprit(model, BATCH) is None
    found = culprit(model, BATCH, backward=True)
    assert found is not None
    assert (found.place, found.name) == (Place.GRADIENT, "0")  # the gradient that came out of Root and into Linear


def test_several_models_are_told_apart() -> None:
    models = {"g": net(), "d": net(Divides(0.0))}
    found = find_non_finite(models, lambda: [model(BATCH) for model in models.values()])
    assert found is not None and found.name == "d.3.1"


def test_a_replay_leaves_no_trace() -> None:
    model = net(Divides(0.0))
    model(BATCH).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    streams = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[index]
    num_hooks = sum(len(m._forward_hooks) for m in model.modules())
    assert culprit(model, BATCH, backward=True) is not None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tobytes() == streams[2]  # type: ignore[index]
    assert sum(len(m._forward_hooks) for m in model.modules()) == num_hooks


def test_a_window_is_replayed_from_what_was_kept() -> None:
    model = nn.Sequential(nn.Linear(7, 13), Divides())
    keeper = InputKeeper({"model": model})
    keeper.begin()
    bad = BATCH.clone()
    bad[0, 0] = float("nan")
    for batch in (BATCH, bad):
        model(batch)
    with torch.no_grad():
        model(bad)  # an evaluation is no part of the window
    found = keeper.replay(contextlib.nullcontext())
    assert found is not None and found.place is Place.INPUT
    keeper.begin()
    model(BATCH)
    assert keeper.replay(contextlib.nullcontext()) is None
    copied = copy.deepcopy(model)  # as an average of the weights makes one
    assert copied is not model
    keeper.end()
    assert not model._forward_pre_hooks
