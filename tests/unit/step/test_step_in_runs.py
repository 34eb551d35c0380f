"""The step's own state inside a run: several optimizers, curves, loss scales, skip rate, noise — cut at any window."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samerun
from samerun.errors import Refused, UsageError
from samerun.step.schedule import Constant, WarmupCosine
from step_jobs import batches, flat, loss_sum, net

NUM_UPDATES = 5


def data(seed: int = 1) -> samerun.Data:
    dataset = torch.utils.data.TensorDataset(*batches([24], torch.float32)[0])
    return samerun.Data(dataset, global_batch=4, micro_batch=2, seed=seed)


def train_gan(path: Path, until: int) -> dict[str, Any]:
    torch.manual_seed(5)
    generator, critic = nn.Linear(3, 7), net(dtype=torch.float32, norm=True)
    optimizers = {
        "g": torch.optim.AdamW(generator.parameters(), lr=0.1),
        "d": torch.optim.AdamW(critic.parameters(), lr=0.05),
    }
    run = samerun.Run(
        path,
        model={"g": generator, "d": critic},
        optimizer=optimizers,
        scheduler={"g": WarmupCosine(warmup=2, total=9), "d": Constant(warmup=3)},
        data=data(),
        precision="fp16",
        max_norm=1.0,
        save_every="1 updates",
    )
    seen = []
    with run:
        for window in run.windows(until=until):
            for real, _ in window:
                fake = generator(torch.randn(len(real), 3))
                d_loss = critic(real).square().sum() + (critic(fake.detach()) - 1).square().sum()
                window.backward(d_loss, len(real), of="d")
                window.backward(critic(fake).square().sum() * 1e-3, len(real), of="g")
            for name in ("d", "g"):
                outcome = window.step(name)
                seen.append((name, outcome.reason.value, outcome.loss, outcome.lr, outcome.scale))
        progress = run.progress.to_json()
    return {"seen": seen, "g": flat(generator), "d": flat(critic), "progress": progress}


def test_a_gan_cut_at_any_update_is_its_twin(tmp_path: Path) -> None:
    twin = train_gan(tmp_path / "twin", NUM_UPDATES)
    assert {name for name, *_ in twin["seen"]} == {"d", "g"}
    for cut in range(1, NUM_UPDATES):
        before = train_gan(tmp_path / f"{cut}", cut)
        after = train_gan(tmp_path / f"{cut}", NUM_UPDATES)
        assert before["seen"] + after["seen"] == twin["seen"]
        assert (after["g"], after["d"], after["progress"]) == (twin["g"], twin["d"], twin["progress"])


def test_one_optimizer_over_several_models_needs_no_name(tmp_path: Path) -> None:
    torch.manual_seed(5)
    first, second = nn.Linear(7, 7), net(dtype=torch.float32)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with samerun.Run(tmp_path / "run", model={"a": first, "b": second}, optimizer=optimizer, data=data()) as run:
        for window in run.windows(until=2):
            for inputs, targets in window:
                window.backward(loss_sum(second, (first(inputs), targets)), len(targets))
            assert window.step().updated


def train(path: Path, until: str | int, *, clock: str = "updates", bad: tuple[int, ...] = (), **options: Any) -> Any:
    model = net(dtype=torch.float32, norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    curve = options.pop("curve", WarmupCosine(warmup=8, total=60, final=0.1))
    run = samerun.Run(
        path, model=model, optimizer=optimizer, scheduler=curve, data=data(), clock=clock, noise_every=2, **options
    )
    seen = []
    with run:
        for window in run.windows(until=until):
            for batch in window:
                loss = loss_sum(model, batch)
                window.backward(loss * (math.nan if window.index in bad else 1.0), len(batch[1]))
            outcome = window.step()
            seen.append((outcome.reason.value, outcome.lr))
        noise = run.noise()
    return seen, flat(model), noise


@pytest.mark.parametrize("clock", ["updates", "samples", "tokens"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_curves_and_noise_go_on_as_in_the_twin(tmp_path: Path, clock: str, precision: str) -> None:
    twin = train(tmp_path / "twin", 6, clock=clock, bad=(1,), precision=precision)
    before = train(tmp_path / "run", 3, clock=clock, bad=(1,), precision=precision)
    after = train(tmp_path / "run", 6, clock=clock, bad=(1,), precision=precision)
    assert before[0] + after[0] == twin[0]
    assert after[1:] == twin[1:]
    assert twin[0][1][0] == "non_finite_loss"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curve": WarmupCosine(warmup=8, total=61, final=0.1)}, "total: saved 60, now 61"),
        ({"clock": "tokens"}, "clock: saved .*updates.*, now .*tokens"),
        ({"max_norm": 1.0}, "max_norm: saved nothing, now 1.0"),
        ({"objective": "example-mean"}, "objective"),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_what_changes_the_numbers_is_refused_with_both_values(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    train(tmp_path / "run", 2)
    with pytest.raises(Refused, match=message):
        train(tmp_path / "run", 4, **change)


def test_skips_are_in_the_journal_with_their_loss_and_the_rate_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", 2, bad=tuple(range(6)))
    journals = sorted((tmp_path / "run/journal").iterdir())
    events = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    skipped = [event for event in events if event["event"] == "skipped"]
    assert [(event["window"], event["reason"], event["loss"]) for event in skipped] == [
        (number, "non_finite_loss", "nan") for number in range(6)
    ]
    assert len([event for event in events if event["event"] == "skip_rate"]) == 1
    assert capsys.readouterr().err.count("windows were skipped, more than 5%") == 1
    train(tmp_path / "run", 4)
    assert "more than 5%" not in capsys.readouterr().err, "above before the resume, so it is no crossing"


def test_noise_is_refused_unless_asked_for(tmp_path: Path) -> None:
    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        samerun.Run(tmp_path / "run", model=model, optimizer=optimizer, data=data()) as run,
        pytest.raises(UsageError, match="noise_every"),
    ):
        run.noise()


def test_the_microbatch_mean_is_a_named_choice(tmp_path: Path) -> None:
    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"model": model, "optimizer": optimizer, "data": data()}
    with samerun.Run(tmp_path / "run", objective="microbatch-mean", **options) as run:
        for window in run.windows(until=1):
            for inputs, targets in window:
                window.backward(mean=nn.functional.cross_entropy(model(inputs), targets))
            assert window.step().weight == 2
    identity = json.loads((tmp_path / "run/run.json").read_text())["run"]["identity"]
    assert identity["step"]["objective"] == "microbatch-mean"
    with pytest.raises(UsageError, match="choose one of 'token-mean'"):
        samerun.Run(tmp_path / "other", objective="mean", **options)


def compiled_session(path: Path, until: int, *, compiled: bool) -> list[float]:
    """Trains to `until` with an average of the weights beside them; returns both."""
    inner = net(dtype=torch.float32, norm=True)
    model = torch.compile(inner, backend="eager") if compiled else inner
    average = torch.optim.swa_utils.AveragedModel(inner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.1)
    with samerun.Run(path, model=model, optimizer=optimizer, data=data(), extra={"ema": average}) as run:
        for window in run.windows(until=until):
            for batch in window:
                window.backward(loss_sum(model, batch), len(batch[1]))
            window.step()
            average.update_parameters(inner)
    return [*flat(inner), *flat(average.module)]


def test_compiling_on_off_and_on_again_is_one_run_with_its_average(tmp_path: Path) -> None:
    """A name with `_orig_mod` in it would be another parameter; an average that starts anew would be another one."""
    twin = compiled_session(tmp_path / "twin", 3, compiled=False)
    for until, compiled in ((1, True), (2, False), (3, True)):
        final = compiled_session(tmp_path / "run", until, compiled=compiled)
    assert final == twin
