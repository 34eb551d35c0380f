"""Faults that users of other trainers reported, each as a test named after its kind, with the right answer."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samerun
from rank_pool import RankPool
from samerun.errors import Refused
from samerun.step import Step
from samerun.step.precision import LossScale, Precision
from step_jobs import (
    Poisoned,
    batches,
    bf16_sums,
    big_batch,
    flat,
    loss_sum,
    net,
)


def close(one: list[float], other: Any) -> bool:
    return torch.allclose(torch.tensor(one, dtype=torch.float64), other, rtol=0, atol=1e-12)


# ---- accumulation and the loss's denominator


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_loss_and_norm_do_not_grow_with_the_number_of_microbatches(num_microbatches: int) -> None:
    inputs, targets = batches([16])[0]
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    size = 16 // num_microbatches
    window = step.window([(inputs[k : k + size], targets[k : k + size]) for k in range(0, 16, size)])
    for batch in window:
        window.backward(loss_sum(model, batch), len(batch[1]))
    outcome = window.step()
    _, loss, norm = big_batch((16,))
    assert outcome.loss == pytest.approx(loss, abs=1e-12)
    assert outcome.grad_norm == pytest.approx(norm, abs=1e-12)


def test_loss_does_not_grow_for_a_model_that_takes_no_token_count() -> None:
    """Its loss is a mean already; told the count, the window is still the token mean."""
    results = []
    for sizes in ([16], [8, 8], [2] * 8):
        inputs, targets = batches([16])[0]
        model = net()
        step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        parts = zip(inputs.split(sizes), targets.split(sizes), strict=True)
        window = step.window(list(parts))
        for rows, labels in window:
            window.backward(mean=nn.functional.cross_entropy(model(rows), labels), weight=len(labels))
        results.append(window.step().loss)
    assert results == pytest.approx([results[0]] * 3, abs=1e-12)


def test_ranks_with_few_supervised_tokens_weigh_little(ranks: RankPool) -> None:
    expected, _, _ = big_batch((1, 15))
    for answer in ranks.run(2, "step_jobs:one_window", wrap="ddp", counts=[1, 15]):
        assert close(answer["parameters"], expected)


def test_a_rank_with_padding_only_adds_nothing_and_no_nan(ranks: RankPool) -> None:
    expected, loss, _ = big_batch((15,))
    for answer in ranks.run(2, "step_jobs:empty_batch_on_one_rank", counts=[15, 0]):
        assert answer["reason"] == "updated"
        assert answer["loss"] == pytest.approx(loss, abs=1e-12)
        assert close(answer["parameters"], expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_context_parallel_ranks_count_their_own_tokens(ranks: RankPool, world_size: int) -> None:
    """One example's tokens split by hand and unevenly: the same gradient as on one rank, and one sample."""
    counts = (5, 11, 2)[:world_size]
    expected, loss, norm = big_batch(counts)
    for answer in ranks.run(world_size, "step_jobs:context_parallel", counts=counts):
        assert answer["weight"] == sum(counts)
        assert answer["progress"]["samples"] == 1
        assert answer["loss"] == pytest.approx(loss, abs=1e-12)
        assert answer["norm"] == pytest.approx(norm, abs=1e-12)
        assert close(answer["parameters"], expected)


def test_a_schedule_of_its_own_over_microbatches_is_a_plain_sum() -> None:
    """A pipeline schedule runs the backwards itself; nothing rescales what is accumulated in between."""
    expected, _, _ = big_batch((7, 1, 3, 5))
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    window = step.window(batches([7, 1, 3, 5]))
    for batch in window:
        loss = loss_sum(model, batch)
        loss.backward()
        window.record(loss, len(batch[1]))
    assert window.step().updated
    assert close(flat(model), expected)


def test_memory_does_not_grow_with_the_number_of_microbatches() -> None:
    """When a batch is handed out, the graphs of all earlier ones are gone."""
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    graphs: list[weakref.ref[torch.Tensor]] = []
    window = step.window(batches([3] * 8))
    for batch in window:
        gc.collect()
        assert all(graph() is None for graph in graphs)
        hidden = model.into(batch[0])
        graphs.append(weakref.ref(hidden))
        loss = nn.functional.cross_entropy(model.out(torch.tanh(hidden)), batch[1], reduction="sum")
        window.backward(loss, 3)
        del hidden, loss
    assert window.step().updated


@pytest.mark.parametrize("wrap", ["solo", "ddp", "fsdp"])
def test_low_precision_gradients_are_summed_in_float32(ranks: RankPool, wrap: str) -> None:
    """256 + 1 + 1 + 2 = 260 of which bfloat16 sums keep 256 + 2 at best; weights of 1/4 make the mean the sum."""
    answers = [bf16_sums("solo")] if wrap == "solo" else ranks.run(2, "step_jobs:bf16_sums", wrap=wrap)
    assert answers == [260.0] * len(answers)
    low = torch.tensor(256.0, dtype=torch.bfloat16)
    assert float(low + 1) == 256.0


# ---- AMP, skip, clip


def run_ten(bad: tuple[int, ...], precision: str = "fp32") -> tuple[Step, Any]:
    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = Step(model, optimizer, scheduler=scheduler, precision=precision)
    for number in range(10):
        window = step.window(batches([4], torch.float32), num_samples=[4])
        for batch in window:
            loss = loss_sum(model, batch)
            window.backward(Poisoned.apply(loss) if number in bad else loss, 4)
        window.step()
    return step, scheduler


def test_the_schedule_does_not_advance_when_the_update_was_skipped() -> None:
    step, scheduler = run_ten(bad=(1, 3))
    assert step.progress.to_json() == {"windows": 10, "skipped": 2, "updates": 8, "samples": 40, "tokens": 40}
    assert scheduler.last_epoch == 8


@pytest.mark.parametrize("used", [False, True])
def test_scale_and_growth_tracker_come_back_into_fresh_and_used_processes(used: bool) -> None:
    saved = run_ten(bad=(1, 3), precision="fp16")[0].state_dict()
    assert (saved["scaler"]["scale"], saved["scaler"]["_growth_tracker"]) == (16384.0, 6)
    other = run_ten(bad=(0,), precision="fp16")[0] if used else run_none("fp16")
    other.load_state_dict(saved)
    assert other.state_dict()["scaler"] == saved["scaler"]


def run_none(precision: str) -> Step:
    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(
        model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1), precision=precision
    )


def test_the_first_call_after_a_load_may_be_unscale() -> None:
    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (LossScale(Precision.FP16, torch.device("cpu")) for _ in range(2))
    first.start(8.0)
    second.load_state_dict(first.state_dict())
    second.unscale(optimizer)
    second.settle(optimizer, overflowed=False)
    assert second.state_dict()["_growth_tracker"] == 1


def test_fp16_updates_after_a_resume_are_the_twins() -> None:
    twin = interrupted_at(None)
    for cut in range(1, 6):
        assert interrupted_at(cut) == twin


def interrupted_at(cut: int | None) -> list[Any]:
    """Loss, scale and parameters of ten fp16 windows, one of them bad, with everything loaded anew at the cut."""
    model = net(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = Step(model, optimizer, precision="fp16")
    seen: list[Any] = []
    for number in range(10):
        if number == cut:
            weights, moments, state = model.state_dict(), optimizer.state_dict(), step.state_dict()
            model = net(dtype=torch.float32)
            model.load_state_dict(weights)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            optimizer.load_state_dict(moments)
            step = Step(model, optimizer, precision="fp16")
            step.load_state_dict(state)
        window = step.window(batches([4, 9], torch.float32))
        for batch in window:
            loss = loss_sum(model, batch)
            window.backward(Poisoned.apply(loss) if number == 2 else loss, len(batch[1]))
        outcome = window.step()
        seen.append((outcome.loss, outcome.scale, flat(model)))
    return seen


def test_one_bad_rank_never_leaves_ranks_with_different_parameters(ranks: RankPool) -> None:
    answers = ranks.run(2, "step_jobs:skips", wrap="ddp", kind="gradient", bad_rank=0)
    assert answers[0]["parameters"] == answers[1]["parameters"]


def test_the_norm_of_shards_is_the_norm_of_the_whole(ranks: RankPool) -> None:
    _, _, norm = big_batch((4, 9))
    for answer in ranks.run(2, "step_jobs:one_window", wrap="fsdp", counts=[4, 9]):
        assert answer["norm"] == pytest.approx(norm, rel=1e-12)


# ---- learning rate, counters, whole runs


def test_a_plateau_scheduler_counts_one_validation_once(ranks: RankPool, tmp_path: Path) -> None:
    for answer in ranks.run(2, "step_jobs:plateau", path=str(tmp_path / "run")):
        assert answer == {"count": 3, "lr": pytest.approx(0.01)}


def training(
    path: Path, until: int, *, global_batch: int = 4, micro_batch: int = 2, evaluate: bool = False, **options: Any
) -> Any:
    model = net(norm=micro_batch == 2, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = samerun.Data(
        torch.utils.data.TensorDataset(*batches([24], torch.float32)[0]),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=1,
        **options,
    )
    curve = samerun.step.schedule.WarmupCosine(warmup=2, total=20)
    run = samerun.Run(path, model=model, optimizer=optimizer, scheduler=curve, data=data, precision="fp16")
    rates, losses = [], []
    with run:
        for window in run.windows(until=until):
            for batch in window:
                window.backward(loss_sum(model, batch), len(batch[1]))
            rates.append(window.step().lr)
            if evaluate:
                losses.append(run.evaluate("val_loss", lambda: loss_sum(model, batches([8], torch.float32)[0])))
    return rates, flat(model), losses


def test_the_rate_is_the_twins_after_every_cut_and_a_final_checkpoint_resumes_for_more(tmp_path: Path) -> None:
    twin = training(tmp_path / "twin", 6)
    for cut in range(1, 6):
        before = training(tmp_path / f"cut-{cut}", cut)
        after = training(tmp_path / f"cut-{cut}", 6)
        assert before[0] + after[0] == twin[0]
        assert after[1] == twin[1]


def test_evaluation_losses_are_not_divided_by_the_number_of_microbatches(tmp_path: Path) -> None:
    whole = training(tmp_path / "one", 1, micro_batch=4, evaluate=True)[2]
    parts = training(tmp_path / "four", 1, micro_batch=1, evaluate=True)[2]
    assert whole == pytest.approx(parts, rel=1e-3)  # fp16 forwards of other sizes


def test_another_global_batch_on_resume_is_refused_with_both_values(tmp_path: Path) -> None:
    training(tmp_path / "run", 2)
    with pytest.raises(Refused, match=r"global_batch: saved 4, now 8"):
        training(tmp_path / "run", 4, global_batch=8)


def test_the_same_batch_cut_otherwise_resumes_with_the_same_updates_to_come(tmp_path: Path) -> None:
    """Four times one sample, then once four: refused unless allowed, and then as many updates as before."""
    twin = training(tmp_path / "twin", 5, micro_batch=1)
    before = training(tmp_path / "run", 2, micro_batch=1)
    with pytest.raises(Refused, match=r"micro_batch: saved 1, now 4"):
        training(tmp_path / "run", 5, micro_batch=4)
    after = training(tmp_path / "run", 5, micro_batch=4, on_change="rebatch")
    assert before[0] + after[0] == twin[0] and len(after[0]) == 3
    assert torch.allclose(torch.tensor(after[1]), torch.tensor(twin[1]), atol=2e-2)  # fp16 forwards of other sizes


def test_nothing_is_hidden_when_the_objective_is_not_finite() -> None:
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    window = step.window(batches([3, 4]))
    for number, batch in enumerate(window):
        window.backward(loss_sum(model, batch) * (math.nan if number else 1.0), len(batch[1]))
    assert math.isnan(window.step().loss)


def test_the_same_update_by_every_way_to_say_it() -> None:
    expected, loss, norm = big_batch((7, 1, 3, 5))
    for way in ("sum", "sum, weight on the device", "mean", "recorded"):
        model = net()
        step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        window = step.window(batches([7, 1, 3, 5]))
        for batch in window:
            total, count = loss_sum(model, batch), len(batch[1])
            if way == "mean":
                window.backward(mean=total / count, weight=count)
            elif way == "recorded":
                total.backward()
                window.record(total, count)
            else:
                window.backward(total, torch.tensor(count) if "device" in way else count)
        outcome = window.step()
        assert close(flat(model), expected), way
        assert (outcome.loss, outcome.grad_norm) == (pytest.approx(loss), pytest.approx(norm)), way
