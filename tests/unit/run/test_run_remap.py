"""A run that goes on with another batch, curve or clock: said by the user and told before and after, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samerun
from samerun.core.events import read_events
from samerun.errors import Refused, UsageError
from samerun.step.schedule import Constant, WarmupCosine, WarmupLinear

BASE = 0.5
CURVE = WarmupLinear(warmup=8, total=60)


def train(path: Path, until: int, *, batch: int = 4, scheduler: Any = CURVE, **options: Any) -> list[float]:
    """The rate inside each update."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE)
    if not hasattr(scheduler, "factor"):
        scheduler = scheduler(optimizer)
    dataset = [torch.full((3,), float(i)) for i in range(40)]
    sizes = {"global_batch": batch, "micro_batch": options.pop("micro", 2)}
    data = samerun.Data(dataset, **sizes, on_change=options.pop("on_change", "rebatch"))
    run = samerun.Run(path, model=model, optimizer=optimizer, scheduler=scheduler, data=data, **options)
    rates = []
    with run:
        for window in run.windows(until=until):
            for inputs in window:
                window.backward(model(inputs).sum() * 1e-3, 5 * len(inputs))
            rates.append(window.step().lr)
    return rates


def expected(curve: Any, positions: list[float]) -> list[float]:
    return [BASE * curve.factor(position) for position in positions]


def test_a_changed_batch_and_a_schedule_that_counts_updates_are_never_guessed(tmp_path: Path) -> None:
    assert train(tmp_path, 3) == expected(CURVE, [1, 2, 3])
    with pytest.raises(Refused, match=r"(?s)batch was 4 and is now 8.*3 done, 12 samples.*remap='updates'"):
        train(tmp_path, 6, batch=8)
    with pytest.raises(Refused, match=r"data\.global_batch: saved 4, now 8"):
        train(tmp_path, 6, batch=8, on_change="exact", remap="updates")


@pytest.mark.parametrize(
    ("remap", "step"), [("updates", 1.0), ("samples", 2.0), ("tokens", 2.0)], ids=lambda value: str(value)
)
def test_milestones_stay_where_the_user_wants_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], remap: str, step: float
) -> None:
    """Twice the batch: an update is worth one update, or two of the old in data. Also after a second resume."""
    train(tmp_path, 3)
    options = {"batch": 8, "remap": remap}
    assert train(tmp_path, 5, **options) == expected(CURVE, [3 + step, 3 + 2 * step])
    told = capfd.readouterr().err
    assert f"milestones stay at the same {remap}" in told
    assert "was WarmupLinear(warmup=8, total=60, final=0.0) on updates, rate 0.1875 at 3; is Warmup" in told
    assert ("(0.05 for each of the tokens)" in told) is (remap == "tokens")
    assert train(tmp_path, 6, **options) == expected(CURVE, [3 + 3 * step]), "the exchange rate is saved"
    assert "milestones stay" not in capfd.readouterr().err, "nothing changed any more"
    events = [event for path in sorted((tmp_path / "journal").glob("*[0-9].jsonl")) for event in read_events(path)]
    assert [len(event["remapped"]) for event in events if event["event"] == "started"] == [0, 1, 0]


@pytest.mark.parametrize("micro", [1, 4])
def test_the_same_batch_cut_otherwise_moves_no_milestone_and_asks_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], micro: int
) -> None:
    train(tmp_path, 3)
    assert train(tmp_path, 6, micro=micro) == expected(CURVE, [4, 5, 6])
    assert "milestones" not in capfd.readouterr().err
    with pytest.raises(Refused, match="counts updates"):
        train(tmp_path, 9, micro=2, batch=8)


def test_the_batch_changed_twice(tmp_path: Path) -> None:
    train(tmp_path, 2)
    assert train(tmp_path, 3, batch=8, remap="samples") == expected(CURVE, [4])
    assert train(tmp_path, 5, batch=2, remap="samples") == expected(CURVE, [4.5, 5])


def test_a_curve_on_a_data_clock_goes_on_by_itself(tmp_path: Path) -> None:
    curve = WarmupCosine(warmup=10, total=100)
    train(tmp_path, 3, scheduler=curve, clock="samples")
    assert train(tmp_path, 5, batch=8, scheduler=curve, clock="samples") == expected(curve, [20, 28])


def test_updates_may_be_kept_on_a_data_clock(tmp_path: Path) -> None:
    curve = WarmupCosine(warmup=10, total=100)
    train(tmp_path, 3, scheduler=curve, clock="samples")
    again = train(tmp_path, 5, batch=8, scheduler=curve, clock="samples", remap="updates")
    assert again == expected(curve, [16, 20])


def test_another_horizon_or_curve_is_taken_when_it_is_meant(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 3)
    longer = WarmupLinear(warmup=8, total=90)
    with pytest.raises(Refused, match=r"curve\.total: saved 60, now 90"):
        train(tmp_path, 6, scheduler=longer)
    capfd.readouterr()
    assert train(tmp_path, 6, scheduler=longer, remap="updates") == expected(longer, [4, 5, 6])
    told = capfd.readouterr().err
    assert "was WarmupLinear(warmup=8, total=60, final=0.0) on updates, rate 0.1875 in the last update" in told
    assert "is WarmupLinear(warmup=8, total=90, final=0.0) on updates, rate 0.1875 at 3" in told
    assert train(tmp_path, 7, scheduler=Constant(warmup=2), remap="updates") == [BASE]


def test_another_clock_reads_its_own_counter(tmp_path: Path) -> None:
    """12 samples of 5 tokens were seen: on the token clock the run stands at 60."""
    train(tmp_path, 3)
    curve = WarmupCosine(warmup=100, total=1000)
    again = train(tmp_path, 5, scheduler=curve, clock="tokens", remap="updates")
    assert again == expected(curve, [80, 100])


def test_a_torch_scheduler_counts_its_own_steps(tmp_path: Path) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)

    train(tmp_path, 3, scheduler=make)
    with pytest.raises(Refused, match="counts updates"):
        train(tmp_path, 5, batch=8, scheduler=make)
    with pytest.raises(Refused, match=r"StepLR counts its own steps.*remap='updates'"):
        train(tmp_path, 5, batch=8, scheduler=make, remap="samples")
    assert train(tmp_path, 5, batch=8, scheduler=make, remap="updates") == pytest.approx([BASE, BASE * 0.1])


def test_without_a_schedule_there_is_nothing_to_choose(tmp_path: Path) -> None:
    train(tmp_path, 3, scheduler=Constant(), clock="samples")
    assert train(tmp_path, 4, batch=8, scheduler=Constant(), clock="samples") == [BASE]


def test_an_unknown_counter(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'epochs'.*updates"):
        train(tmp_path, 1, remap="epochs")
