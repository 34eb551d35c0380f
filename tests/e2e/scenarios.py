"""Small trainings that the rank pool runs: everything seeded, everything that makes resuming hard."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import samerun
from samerun.core.clock import ManualClock
from samerun.data import WindowSampler
from samerun.errors import Stopped
from samerun.plan.batch import BatchRequest, plan_batch
from samerun.plan.run import RunPlan
from samerun.preempt import Preemption
from samerun.state.rng import seed_all

WIDTH = 7


class Awkward(nn.Module):
    """Registered in another order than it runs, with BatchNorm, dropout, a tied weight, a frozen and an odd layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(13, WIDTH)
        self.middle = nn.Linear(WIDTH, 13)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first.weight = self.tied.weight
        self.norm = nn.BatchNorm1d(13)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.first(x)))
        x = self.norm(self.middle(self.tied(x)))
        out: torch.Tensor = self.last(nn.functional.dropout(x, 0.2, self.training))
        return out


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from every global generator in `__getitem__`, as augmentations do."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(num_samples, WIDTH, generator=generator)
        self.targets = torch.randn(num_samples, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(WIDTH) + float(np.random.standard_normal()) + random.random()
        return self.inputs[index] + 0.01 * noise, self.targets[index]


class Average:
    """The user's own component: updated after `step()`, so the edge must be the next turn of the loop."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.values = [local(p).clone() for p in self.parameters]
        self.draws = 0.0

    def update(self) -> None:
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(local(parameter), 0.1)
        self.draws += float(torch.rand(())) + random.random() + float(np.random.random())

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]
        for mine, saved in zip(self.values, state["values"], strict=True):
            mine.copy_(saved)


def local(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.to_local() if hasattr(value, "to_local") else value


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        model.norm = nn.Identity()  # BatchNorm statistics of a sharded model are each rank's own; tested under DDP
        for name in ("middle", "last"):
            fully_shard(getattr(model, name))
        return fully_shard(model)
    return model


def train(
    path: str,
    *,
    wrap: str = "none",
    until: int = 8,
    num_samples: int = 42,
    global_batch: int = 12,
    micro_batch: int = 2,
    save_every: str = "3 updates",
    precision: str = "fp32",
    workers: int = 0,
    own_loader: bool = False,
    accumulate: str = "sharded",
    draw_in_body: bool = True,
    keep_last: int = 5,
    longest: int = 40,
    planned: bool = False,
    background: bool = True,
    on_save_error: str = "stop",
    preemption: Preemption | None = None,
    in_batch: Callable[[samerun.Run, int, int, Average], None] = lambda run, window, slot, average: None,
) -> dict[str, Any]:
    """One start of the run at `path`; returns what it ended as."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    seed_all(5)
    model = wrapped(wrap, Awkward())
    seed_all(100 + rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=longest)
    average = Average(model)
    data: Any
    if own_loader:
        sampler = WindowSampler(num_samples, global_batch=global_batch, micro_batch=micro_batch, seed=11)
        data = DataLoader(Noisy(num_samples), batch_sampler=sampler, num_workers=workers)
    else:
        data = samerun.Data(
            Noisy(num_samples), global_batch=global_batch, micro_batch=micro_batch, seed=11, num_workers=workers
        )
    run = samerun.Run(
        path,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        extra={"ema": average},
        precision=precision,
        accumulate=accumulate,
        max_norm=1.0,
        save_every=save_every,
        keep_last=keep_last,
        background=background,
        on_save_error=on_save_error,
        plan=plan_for(global_batch, micro_batch) if planned else None,
        preemption=preemption,
    )
    losses = []
    with run:
        for window in run.windows(until=until):
            for slot, (inputs, targets) in enumerate(window):
                loss = ((model(inputs) - targets) ** 2).sum()
                window.backward(loss, len(inputs) * WIDTH)
                in_batch(run, window.index, slot, average)
            outcome = window.step()
            losses.append(outcome.loss)
            if draw_in_body:
                average.update()
            if outcome.updated and run.progress.updates % 4 == 0:
                run.evaluate("noise", lambda: float(torch.rand(()) + model_sum(model)), better="min")
        progress = run.progress.to_json()
    return {"progress": progress, "losses": losses}


def model_sum(model: nn.Module) -> torch.Tensor:
    return sum((local(p).sum() for p in model.parameters()), torch.zeros(()))


def train_told(
    path: str,
    *,
    at: tuple[int, int, int],
    warning: str,
    microbatch_seconds: float = 10.0,
    changes_extra: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """`train` by a clock on which a microbatch takes long; at=(window, slot, rank): SIGTERM after that microbatch.

    Returns how it was stopped.
    """
    from samerun.preempt import flag
    from samerun.run.starting import opening

    clock = ManualClock()
    rank = dist.get_rank() if dist.is_initialized() else 0

    def in_batch(run: samerun.Run, window: int, slot: int, average: Average) -> None:
        clock.advance(microbatch_seconds)
        if [window, slot, rank] == list(at):
            os.kill(os.getpid(), signal.SIGTERM)
            while not run.alive():
                time.sleep(0.001)
            if changes_extra:
                average.draws += 1.0
        if window == at[0] and dist.is_initialized():
            dist.barrier()  # as sharded models meet in every microbatch; here they are too quick to be told in time

    before = opening.SystemClock, flag.SystemClock
    opening.SystemClock = flag.SystemClock = lambda: clock  # type: ignore[assignment, misc]
    try:
        train(path, in_batch=in_batch, preemption=Preemption(warning=warning), **options)
    except Stopped as stopped:
        return {"reason": stopped.reason}
    finally:
        opening.SystemClock, flag.SystemClock = before  # type: ignore[misc]
    raise AssertionError("nothing stopped it")


def train_unsettled(path: str, **options: Any) -> dict[str, Any]:
    """`train` without the throw-away backward that settles DDP's bucket order."""
    from samerun.run.starting import opening

    settle, opening.settle_bucket_order = opening.settle_bucket_order, lambda models: None
    try:
        return train(path, **options)
    finally:
        opening.settle_bucket_order = settle


def plan_for(global_batch: int, micro_batch: int) -> RunPlan:
    """What a user plans before launching on this many ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return RunPlan(
        batch=plan_batch(BatchRequest(global_batch=global_batch, micro_batch=micro_batch, num_replicas=ranks))
    )
