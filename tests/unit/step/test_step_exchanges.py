"""How often replicas exchange gradients in a window, and that nothing odd about a model's parameters breaks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rank_pool import RankPool
from samerun.errors import UsageError
from samerun.step import Step
from samerun.step.options import Objective, StepOptions
from samerun.step.parallel.sync import Accumulate
from samerun.step.precision import Precision
from step_jobs import batches, flat, loss_sum, net


@pytest.mark.parametrize(
    ("wrap", "accumulate", "times"), [("ddp", "sharded", 1), ("fsdp", "sharded", 4), ("fsdp", "unsharded", 1)]
)
def test_exchanges_in_a_window_of_four_microbatches(ranks: RankPool, wrap: str, accumulate: str, times: int) -> None:
    for counts in ranks.run(2, "step_jobs:exchanges", wrap=wrap, accumulate=accumulate, num_microbatches=4):
        assert counts == [times] * 3


def trained(change: Any = None) -> list[float]:
    model = net()
    parameters = list(model.parameters())
    if change is not None:
        change(model)
    step = Step(model, torch.optim.AdamW(parameters, lr=0.1), max_norm=1.0)
    for _ in range(2):
        window = step.window(batches([3, 5]))
        for batch in window:
            window.backward(loss_sum(model, batch), len(batch[1]))
        assert window.step().updated
    return flat(model)


def test_a_parameter_without_gradient_changes_nothing_for_the_others() -> None:
    def unused(model: nn.Module) -> None:
        model.unused = nn.Linear(3, 3)

    assert trained(unused)[: len(trained())] == trained()


def test_a_frozen_parameter_stays() -> None:
    def freeze(model: nn.Module) -> None:
        model.into.weight.requires_grad_(False)

    before, after = torch.tensor(flat(net())), torch.tensor(trained(freeze))
    assert int((before == after).sum()) == net().into.weight.numel()


def test_a_tied_weight_counts_once_in_the_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    model[1].weight = model[0].weight
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    window = step.window([torch.ones(2, 4, dtype=torch.float64)])
    for batch in window:
        window.backward(model(batch).sum(), 2)
    weight = model[0].weight.detach().clone().requires_grad_()
    (torch.ones(2, 4, dtype=torch.float64) @ weight.T @ weight.T).sum().div(2).backward()
    assert weight.grad is not None
    assert window.step().grad_norm == pytest.approx(float(weight.grad.norm()), rel=1e-12)


def test_complex_parameters_are_normed() -> None:
    weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    model = nn.Module()
    model.weight = weight
    step = Step(model, torch.optim.SGD([weight], lr=0.0))
    window = step.window([1])
    for _ in window:
        window.backward((weight.abs() ** 2).sum(), 1)
    assert window.step().grad_norm == pytest.approx(2 * 15**0.5, rel=1e-6)


def test_options_are_checked_and_their_identity_is_plain() -> None:
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="max_norm"):
            StepOptions(max_norm=wrong)
    for kind in (Precision, Objective, Accumulate):
        with pytest.raises(UsageError, match="how='no such' is unknown; choose one of "):
            kind.parse("no such", option="how")
        assert all(kind.parse(member.value, option="how") is member for member in kind)
    assert StepOptions().identity() == {
        "precision": "fp32",
        "objective": "token-mean",
        "accumulate": "sharded",
        "max_norm": None,
    }


def test_empty_windows_and_wrong_sample_counts_are_refused() -> None:
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="at least one batch"):
        step.window([])
    with pytest.raises(UsageError, match="2 entries for 1 batches"):
        step.window(batches([3]), num_samples=[1, 2])
