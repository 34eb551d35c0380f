"""Trainings on ranks of which one was given something that cannot work; run by the rank pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samerun

ROWS = [torch.full((3,), float(i)) for i in range(20)]


def train(path: str, *, case: str, guilty: int) -> None:
    """Three windows; the rank `guilty` (-1: every rank) does what `case` says."""
    mine = guilty in (dist.get_rank(), -1)
    model: Any = nn.Linear(3, 1)
    model = model if mine and case == "unwrapped" else DistributedDataParallel(model)
    trained = nn.Linear(3, 1) if mine and case == "optimizer" else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    rows = {"empty": [], "shorter": ROWS[:19]}.get(case, ROWS) if mine else ROWS
    batch = {"batch": 6, "too small": 2}.get(case, 4) if mine else 4
    data = samerun.Data(rows, global_batch=batch, micro_batch=2)
    if mine and case == "behind":
        begun(data)
    options: dict[str, Any] = {"max_norm": float("nan")} if mine and case == "max_norm" else {}
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, health="off", **options)
    with run:
        for window in run.windows(until="3 epochs of nonsense" if mine and case == "until" else 3):
            for inputs in window:
                loss = model(inputs).sum()
                weight: Any = len(inputs)
                if mine and case == "weight" and window.index == 1:
                    weight = -1
                if mine and case == "detached" and window.index == 1:
                    loss = loss.detach()
                window.backward(loss, 0 if mine and case == "empty windows" else weight)
            window.step()


def begun(data: samerun.Data) -> None:
    window = next(data.windows())
    list(window)
    data.commit(window)
    data.close()
