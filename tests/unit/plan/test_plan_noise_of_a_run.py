"""`samerun plan noise RUN` says what the run itself measured, from its journal alone, over all attempts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import samerun
from samerun.cli.plan import main
from samerun.cli.plan.hypotheses import read_measurements
from samerun.errors import UsageError
from samerun.plan import plan_noise
from samerun.plan.noise import Measured
from samerun.step.noise import NoiseEstimate

NUM_WINDOWS = 13


def train(path: Path, until: int, *, every: int | None, bad: int | None = None) -> NoiseEstimate | None:
    torch.manual_seed(3)
    inputs = torch.randn(364, 7, dtype=torch.float64)
    targets = inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(364, 1, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    data = samerun.Data(dataset, global_batch=26, micro_batch=4, seed=7)
    model = nn.Linear(7, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with samerun.Run(path, model=model, optimizer=optimizer, data=data, noise_every=every, max_norm=0.1) as run:
        for window in run.windows(until=until):
            for x, y in window:
                loss = (model(x) - y).square().sum()
                window.backward(loss * (torch.nan if window.index == bad else 1.0), len(x))
            window.step()
        return run.noise() if every is not None else None


def test_the_journal_holds_what_the_run_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Norms before clipping; six microbatches of 4 samples and one of 2 have a harmonic mean of 3.5."""
    train(tmp_path / "run", 6, every=2, bad=4)
    seen = train(tmp_path / "run", NUM_WINDOWS, every=2, bad=4)
    assert seen is not None
    assert seen.is_identifiable
    measured = read_measurements(tmp_path / "run")
    assert {(window.small_batch, window.big_batch) for window in measured} == {(3.5, 26.0)}
    assert len(measured) == seen.num_windows == 6  # of 14 windows: 0, 2, 6, 8, 10, 12; window 4 was skipped
    plan = plan_noise(measured)
    assert plan.noise_scale == pytest.approx(seen.noise_scale, rel=1e-12)
    assert (plan.lower, plan.upper) == pytest.approx((seen.lower, seen.upper), rel=1e-9)
    with pytest.raises(SystemExit):
        main(["noise", str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out)["noise_scale"] == pytest.approx(seen.noise_scale, rel=1e-12)


def test_a_run_that_measured_nothing_is_told_how(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, every=None)
    with pytest.raises(UsageError, match="noise_every=10"):
        read_measurements(tmp_path / "run")


def test_windows_may_differ_in_their_batches() -> None:
    """|G|² = 0.25 and tr Σ = 20 from every window, whatever its batches; given batches win over a window's own."""
    windows = [
        Measured(
            small_squared_norm=0.25 + 20 / small, big_squared_norm=0.25 + 20 / big, small_batch=small, big_batch=big
        )
        for small, big in ((4, 64), (7, 91), (1, 13))
    ]
    plan = plan_noise(windows)
    assert plan.noise_scale == pytest.approx(80)
    assert (plan.small_batch, plan.big_batch) == (4, 56)
    assert plan_noise(windows, 4, 64).noise_scale != pytest.approx(80)


def test_batches_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--small 4 --big 64"):
        plan_noise([Measured(small_squared_norm=2, big_squared_norm=1)])
    file = tmp_path / "measured.jsonl"
    file.write_text('{"small_squared_norm": 2, "big_squared_norm": 1, "small_batch": "4"}\n')
    with pytest.raises(UsageError, match="line 1: small_batch must be a number"):
        read_measurements(file)
