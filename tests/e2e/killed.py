"""Trainings of awkward kinds, killed for real: `python killed.py FOLDER all|KIND POINT …`.

Each start is a fork of this process, which has torch imported: it costs tenths of a second, and a planned SIGKILL ends
it as the kernel's own would. Without points each kind gets its own. Prints {kind: [exit code of each start]}, the
twin's first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from scenarios import Average, Awkward, Noisy
from torch import nn

import samerun
from samerun.run.faults import Deed, Fault, FaultPlan
from samerun.state.rng import seed_all

UNTIL, SAMPLES = 6, 13
BETWEEN = "between"
"""A point of the GAN's own: its critic has stepped, its generator has not."""
POINTS = {
    "gan": ("window:1.microbatch:1", BETWEEN, "save:manifest", "edge:4"),
    "compiled": ("window:3.step", "save:manifest"),
    "average": ("window:1.step", "save:committed", "window:4.microbatch:0"),
}


def data() -> samerun.Data:
    return samerun.Data(Noisy(SAMPLES), global_batch=4, micro_batch=2, seed=11)


def train_gan(path: str, attempt: int, point: str | None) -> None:
    """Two models, two optimizers, BatchNorm and dropout in both; the generator's noise is drawn in the body."""
    seed_all(5)
    generator = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 7))
    critic = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 1))
    models = {"g": generator, "d": critic}
    optimizers: dict[str, Any] = {
        "g": torch.optim.AdamW(generator.parameters(), lr=0.01),
        "d": torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9),
    }
    schedulers = {"d": torch.optim.lr_scheduler.StepLR(optimizers["d"], 2, 0.5)}
    seed_all(100 + max(attempt, 1))  # what a script draws before a resume must not matter
    run = samerun.Run(
        path,
        model=models,
        optimizer=optimizers,
        scheduler=schedulers,
        data=data(),
        save_every="2 updates",
        max_norm=1.0,
    )
    with run:
        for window in run.windows(until=UNTIL):
            for real, _ in window:
                fake = generator(torch.randn(len(real), 3))
                window.backward((critic(fake.detach()) - critic(real)).sum(), len(real), of="d")
            window.step("d")
            if point == BETWEEN and window.index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            window.backward(-critic(generator(torch.randn(4, 3))).sum(), 4, of="g")
            window.step("g")


def train_compiled(path: str, attempt: int, point: str | None) -> None:
    """Compiled in every other attempt: the model is the same one, under the same names."""
    seed_all(5)
    plain = Awkward()
    torch._dynamo.reset()
    model: Any = torch.compile(plain, backend="eager") if attempt % 2 else plain
    _train(path, attempt, model, plain, samerun_extra=None)


def train_average(path: str, attempt: int, point: str | None) -> None:
    """An EMA, tied weights, frozen ones, a layer of which nothing is used and a generator of its own."""
    seed_all(5)
    model = Awkward()
    model.unused = nn.Linear(3, 3)
    _train(path, attempt, model, model, samerun_extra=Average(model))


def _train(path: str, attempt: int, model: Any, plain: nn.Module, *, samerun_extra: Average | None) -> None:
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
    extra = {} if samerun_extra is None else {"ema": samerun_extra}
    seed_all(100 + max(attempt, 1))
    run = samerun.Run(
        path, model=model, optimizer=optimizer, scheduler=scheduler, data=data(), extra=extra, save_every="2 updates"
    )
    with run:
        for window in run.windows(until=UNTIL):
            for inputs, targets in window:
                window.backward((model(inputs) - targets).square().sum(), len(inputs))
            window.step()
            if samerun_extra is not None:
                samerun_extra.update()


KINDS: dict[str, Callable[[str, int, str | None], None]] = {
    "gan": train_gan, "compiled": train_compiled, "average": train_average,
}  # fmt: skip


def start(folder: Path, name: str, kind: str, attempt: int, *, at: str | None = None, without: str = "") -> int:
    """The exit code of one start, −9 if it was killed."""
    faults = () if at in (None, BETWEEN) else (Fault(at=at, rank=0, deed=Deed.KILL),)
    plan = FaultPlan(trace=folder / f"{name}-trace", faults=faults, leave_out=(without,) if without else ())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ["SAMERUN_FAULTS"] = plan.to_text()
            log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            KINDS[kind](str(folder / name), attempt, at)
            code = 0
        except BaseException:  # noqa: BLE001  # a forked child must never run on in its parent's program
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(folder: Path, kind: str, points: Sequence[str]) -> list[int]:
    """The twin, a start for each point, one to the end; then another run that forgets its moments, as a control."""
    folder.mkdir(parents=True)
    codes = [start(folder, "twin", kind, 0)]
    for attempt, point in enumerate([*points, None], start=1):
        codes.append(start(folder, "run", kind, attempt, at=point))
    start(folder, "control", kind, 1, at="window:3.step")
    codes.append(start(folder, "control", kind, 2, without="moments"))
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, wanted, *given = sys.argv[1:]
    kinds = KINDS if wanted == "all" else [wanted]
    print(json.dumps({kind: killed(Path(place) / kind, kind, given or POINTS[kind]) for kind in kinds}))
