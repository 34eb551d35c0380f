"""Trainings with something wrong in them: a slow rank, a jump of the loss, a flipped bit, a division by zero."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import samerun
from samerun.core.canonical import sha256_hex
from samerun.health import HealthOptions
from samerun.health.rollback import good, ladder
from samerun.health.spike import detector, threshold
from samerun.run import acting
from samerun.state.rng import seed_all

WIDTH = 7


class Divides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.by


class Inputs(Dataset[torch.Tensor]):
    def __init__(self, num_samples: int) -> None:
        self.values = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


def train(
    path: str,
    *,
    until: int,
    slow_rank: int | None = None,
    slow_seconds: float = 0.004,
    slow_in_data: bool = False,
    zero_at: int | None = None,
    zero_rank: int = 0,
    flip_rank: int | None = None,
    flip_at: int = 3,
    spike_from: int | None = None,
    health: str = "observe",
    report_windows: int = 20,
    checksum_windows: int = 5,
    save_every: str = "1000 updates",
    broken: str | None = None,
) -> dict[str, Any]:
    """One start at `path`; every window has two microbatches a rank."""
    options = HealthOptions(mode=health, report_windows=report_windows, checksum_windows=checksum_windows)
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    seed_all(5)
    divides = Divides()
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 13), divides, nn.ReLU(), nn.Linear(13, 1))
    bare = model
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = samerun.Data(Inputs(960), global_batch=4 * world_size, micro_batch=2, seed=11)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, health=options, save_every=save_every)
    reasons, losses = [], []
    with run:
        if broken is not None:
            breaks(run, broken)
        for window in run.windows(until=f"{until * 4 * world_size} samples"):
            index = window.index
            divides.by = 0.0 if index == zero_at and rank == zero_rank else 1.0
            for inputs in window:
                if rank == slow_rank:
                    time.sleep(slow_seconds)  # the fault itself, not a wait for something
                factor = 50.0 if spike_from is not None and index >= spike_from else 1.0
                loss = ((model(inputs) - 1) ** 2).sum() * factor
                window.backward(loss, len(inputs))
            outcome = window.step()
            reasons.append(outcome.reason.value)
            losses.append(outcome.loss)
            if rank == flip_rank and index == flip_at:
                with torch.no_grad():
                    bare[3].weight.view(torch.int32)[0, 5] ^= 1 << 3  # type: ignore[index]
        progress = run.progress.to_json()
    return {"progress": progress, "reasons": reasons, "losses": losses}


def breaks(run: samerun.Run, name: str) -> None:
    """Makes one of the monitor's parts raise from now on."""
    health = run._opened()._health  # type: ignore[attr-defined]
    assert health is not None

    def raises(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError(f"planned: {name}")

    target = {
        "spike": (health._spikes, "after"),
        "records": (health, "_write"),
        "straggler": (health._stragglers, "row"),
        "replay": (health._around.lookout.replayer, "again"),
    }
    setattr(*target[name], raises)


@contextlib.contextmanager
def quick_detector() -> Iterator[None]:
    """A detector that is sure of itself after 64 windows and judges a spike after 20."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (threshold, "MIN_SAMPLES", 64),
            (detector, "_GRACE", 64),
            (detector, "RECOVERY_WINDOWS", 20),
            (good, "RECOVERY_WINDOWS", 20),
            (ladder, "RECOVERY_WINDOWS", 20),
            (acting, "RECOVERY_WINDOWS", 20),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def act(path: str, *, until: int, poison: str, mode: str = "act", flip_rank: int | None = None) -> dict[str, Any]:
    """One start of a run that acts. `poison`: "data" from position 600 on, whoever reads it; "once": the first time."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    seed_all(5)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 13), nn.Dropout(0.1), nn.Linear(13, 1))
    bare = model
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = samerun.Data(Inputs(960), global_batch=4, micro_batch=1 if world_size > 1 else 2, seed=11)
    limits = ladder.Limits(quiet_windows=20, skip_before=5, skip_after=60, quarantined_share=0.5)
    options = HealthOptions(mode=mode, margin=20, limits=limits, checksum_windows=5)
    is_first = not list((Path(path) / "retired").glob("*.json"))
    with quick_detector():
        run = samerun.Run(path, model=model, optimizer=optimizer, data=data, health=options, save_every="10 updates")
        with run:
            for window in run.windows(until=until):
                position = data.state_dict()["position"]
                bad = {"data": 600 <= position < 800, "once": position >= 600 and is_first, "none": False}[poison]
                for inputs in window:
                    window.backward(((model(inputs) - 1) ** 2).sum() * (50.0 if bad else 1.0), len(inputs))
                window.step()
                if rank == flip_rank and window.index == 33 and is_first:
                    with torch.no_grad():
                        bare[0].weight.view(torch.int32)[0, 5] ^= 1 << 3  # type: ignore[index]
            progress = run.progress.to_json()
    weights = sha256_hex(b"".join(p.detach().numpy().tobytes() for p in bare.parameters()))
    return {"progress": progress, "cursor": data.state_dict(), "weights": weights}


class Device(nn.Module):
    """Computes as a device with a fault would: in its first run of a batch, in every run, or differently each time."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""
        self.num_runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        if self.fault == "transient" and self.num_runs == 1:
            return x + 1e-3
        if self.fault == "persistent":
            return x + 1e-3
        return x + 1e-3 * self.num_runs if self.fault == "varies" else x


def blame(path: str, *, faults: dict[str, list[Any]], until: int) -> dict[str, Any]:
    """`faults`: window → [rank, fault]; two microbatches a rank and window, every window looked at."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    seed_all(5)
    device = Device()
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 13), device, nn.Dropout(0.1), nn.BatchNorm1d(13), nn.Linear(13, 1)
    )
    bare = model
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = samerun.Data(Inputs(960), global_batch=8 * world_size, micro_batch=4, seed=11)
    options = HealthOptions(replay_windows=1)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, health=options, save_every="1000 updates")
    with run:
        for window in run.windows(until=f"{until * 8 * world_size} samples"):
            guilty, fault = faults.get(str(window.index), [-1, ""])
            fault = fault if guilty == rank else ""
            if fault == "state":
                with torch.no_grad():
                    bare[0].weight[0, 0] = float("nan")  # type: ignore[index]
            for number, inputs in enumerate(window):
                device.fault, device.num_runs = fault, 0
                if fault == "data" and number == 0:
                    inputs[1, 2] = float("nan")
                window.backward(((model(inputs) - 1) ** 2).sum(), len(inputs))
            window.step()
        progress = run.progress.to_json()
    return {"progress": progress}
