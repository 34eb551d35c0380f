"""What is skipped, on all ranks alike, and what a skipped window leaves behind: nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rank_pool import RankPool
from samerun.errors import UsageError
from samerun.step import Step
from step_jobs import Poisoned, batches, flat, loss_sum, net, skips


def check(answer: dict[str, Any], reason: str) -> None:
    first, bad, last = answer["windows"]
    assert first["reason"] == last["reason"] == "updated"
    assert bad["reason"] == reason
    assert bad["same"], "parameters, moments and buffers are bitwise those before the window"
    assert not first["same"]
    assert answer["state"]["progress"] == {"windows": 3, "skipped": 1, "updates": 2, **samples_and_tokens(answer)}
    assert all(math.isfinite(value) for value in answer["parameters"])


def samples_and_tokens(answer: dict[str, Any]) -> dict[str, int]:
    progress = answer["state"]["progress"]
    return {"samples": progress["samples"], "tokens": progress["tokens"]}


KINDS = [("loss", "non_finite_loss"), ("input", "non_finite_loss"), ("gradient", "non_finite_grad")]


@pytest.mark.parametrize(("kind", "reason"), KINDS)
def test_one_process(kind: str, reason: str) -> None:
    check(skips("solo", kind, 0), reason)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize(("kind", "reason"), KINDS)
def test_a_bad_rank_makes_all_skip(ranks: RankPool, wrap: str, kind: str, reason: str) -> None:
    answers = ranks.run(3, "step_jobs:skips", wrap=wrap, kind=kind, bad_rank=1)
    for answer in answers:
        check(answer, reason)
        assert answer["parameters"] == answers[0]["parameters"]
        assert answer["state"] == answers[0]["state"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_bad_gradient_halves_the_scale_on_every_rank(ranks: RankPool, wrap: str) -> None:
    for answer in ranks.run(2, "step_jobs:skips", wrap=wrap, kind="gradient", bad_rank=1, precision="fp16"):
        scales = [window["scale"] for window in answer["windows"]]
        assert scales == [65536.0, 65536.0, 32768.0]
        assert answer["state"]["scaler"]["_growth_tracker"] == 1


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_bad_loss_leaves_the_scale_alone_on_every_rank(ranks: RankPool, wrap: str) -> None:
    for answer in ranks.run(2, "step_jobs:skips", wrap=wrap, kind="loss", bad_rank=0, precision="fp16"):
        scales = [window["scale"] for window in answer["windows"]]
        assert scales == [65536.0, 65536.0, 65536.0]
        assert answer["state"]["scaler"]["_growth_tracker"] == 2, "a skipped window neither grows nor resets it"


def test_the_scale_grows_after_clean_windows_and_is_constant_inside_one() -> None:
    model = net(dtype=torch.float32)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="fp16")
    state = step.state_dict()
    state["scaler"] = {**state["scaler"], "growth_interval": 2, "scale": 8.0}
    step.load_state_dict(state)
    scales = []
    for _ in range(5):
        window = step.window(batches([3, 4], torch.float32))
        for batch in window:
            window.backward(loss_sum(model, batch), len(batch[1]))
            assert step.state_dict()["scaler"]["scale"] == ([8.0] * 2 + [16.0] * 2 + [32.0])[len(scales)]
        scales.append(window.step().scale)
    assert scales == [8.0, 8.0, 16.0, 16.0, 32.0]


def test_a_window_without_any_weight_is_skipped() -> None:
    model = net()
    before = flat(model)
    step = Step(model, torch.optim.AdamW(model.parameters(), lr=1.0), precision="fp32")
    outcome = run_window(step, model, [0, 0])
    assert (outcome.reason.value, outcome.weight) == ("no_weight", 0.0)
    assert math.isnan(outcome.loss)
    assert flat(model) == before
    assert run_window(step, model, [2, 0]).updated


def test_a_mean_over_nothing_counts_as_nothing() -> None:
    """cross_entropy's mean over no token is NaN; its weight of 0 says that it stands for nothing."""
    model, reference = net(), net()
    for each, counts in ((model, [3, 0]), (reference, [3])):
        step = Step(each, torch.optim.SGD(each.parameters(), lr=1.0))
        window = step.window(batches(counts))
        for inputs, targets in window:
            mean = nn.functional.cross_entropy(each(inputs), targets)
            window.backward(mean=mean, weight=torch.tensor(len(targets)))
        assert window.step().updated
    assert flat(model) == flat(reference)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_on_the_device_is_a_bad_loss(weight: float) -> None:
    model = net()
    before = flat(model)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    window = step.window(batches([3, 5]))
    for batch in window:  # the good one's weight must not outweigh it
        window.backward(loss_sum(model, batch), torch.tensor(weight if len(batch[1]) == 3 else 5.0))
    assert window.step().reason.value == "non_finite_loss"
    assert flat(model) == before


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_bad_weight_on_the_host_is_the_callers_error(weight: float) -> None:
    model = net()
    window = Step(model, torch.optim.SGD(model.parameters(), lr=1.0)).window(batches([3]))
    with pytest.raises(UsageError, match="finite number of tokens"):
        for batch in window:
            window.backward(loss_sum(model, batch), weight)


def test_the_loss_of_a_skipped_window_is_not_hidden() -> None:
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    window = step.window(batches([3]))
    for batch in window:
        window.backward(Poisoned.apply(loss_sum(model, batch)), 3)
    outcome = window.step()
    assert outcome.reason.value == "non_finite_grad"
    assert math.isfinite(outcome.loss) and outcome.loss > 0


def test_after_a_skip_the_next_window_works_and_is_what_it_would_have_been() -> None:
    """A skip by any reason is as if the window had not been: the next update equals that of a run without it."""
    results = []
    for hurt in (False, True):
        model = net(norm=True)
        step = Step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        run_window(step, model, [5, 3])
        if hurt:
            window = step.window(batches([4]))
            for batch in window:
                window.backward(loss_sum(model, batch) * float("nan"), 4)
            assert not window.step().updated
        run_window(step, model, [2, 6])
        results.append((flat(model), [b.tolist() for b in model.buffers()]))
    assert results[0] == results[1]


def run_window(step: Step, model: nn.Module, counts: list[int]) -> Any:
    window = step.window(batches(counts))
    for batch in window:
        if len(batch[1]):
            window.backward(loss_sum(model, batch), len(batch[1]))
        else:
            window.backward(model(torch.zeros(1, 7, dtype=torch.float64)).sum() * 0.0, 0)
    return window.step()


@pytest.mark.parametrize("tensor_weight", [False, True])
def test_the_tokens_of_a_bad_loss_were_consumed_all_the_same(tensor_weight: bool) -> None:
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    window = step.window(batches([3, 4]))
    for number, batch in enumerate(window):
        count = len(batch[1])
        loss = loss_sum(model, batch) * (math.nan if number else 1.0)
        window.backward(loss, torch.tensor(count) if tensor_weight else count)
    assert window.step().weight == 7
    assert step.progress.tokens == 7


class Remembering(nn.Module):
    """A module whose forward changes a buffer in one of the ways that modules have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        first = {"none yet": None, "expanded": torch.ones(1, 1).expand(3, 3), "scratch": torch.zeros(1)}
        self.register_buffer("seen", first.get(kind, torch.zeros(1)), persistent=kind != "scratch")
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean().reshape(1)
        if self.kind == "grows":
            self.seen = torch.cat([self.seen, mean])
        elif self.kind in ("none yet", "replaced"):
            self.seen = mean.clone()
        elif self.kind == "vanishes":
            self.seen = None
        elif self.kind != "expanded":
            self.seen += mean
        result: torch.Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("kind", ["in place", "scratch", "replaced", "grows", "none yet", "vanishes", "expanded"])
def test_whatever_a_skipped_forward_did_to_a_buffer_is_undone(kind: str) -> None:
    model = Remembering(kind)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = None if model.seen is None else model.seen.clone()
    window = step.window([torch.full((1, 2), math.nan)])
    for batch in window:
        window.backward(model(batch).sum(), 1)
    assert not window.step().updated
    if before is None:
        assert model.seen is None
    else:
        assert torch.equal(model.seen, before)
    assert dict(model.named_buffers()).keys() == dict(Remembering(kind).named_buffers()).keys()
