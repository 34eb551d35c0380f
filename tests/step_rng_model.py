"""Losses of single microbatches of a model with dropout, by their number; run by ranks and in one process."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samerun


def losses(path: str, until: int, rng: str = "by_position") -> dict[str, float]:
    """`window.microbatch` → loss of this rank's own microbatches; the weights never move."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(100 + rank)  # streams of their own, as ranks have them
    if count > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dataset = [torch.full((3,), float(i)) for i in range(40)]
    data = samerun.Data(dataset, global_batch=12, micro_batch=2, seed=3)
    found = {}
    with samerun.Run(Path(path), model=model, optimizer=optimizer, data=data, rng=rng, save_every="1 updates") as run:
        for window in run.windows(until=until):
            for slot, inputs in enumerate(window):
                loss = (model(inputs) * (1 + random.random())).sum()
                window.backward(loss, len(inputs))
                found[f"{window.index}.{slot * count + rank}"] = loss.item()
            torch.rand(3)  # what the loop body draws does not matter
            window.step()
    return found
