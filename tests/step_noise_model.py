"""A model whose gradient noise is known: the loss of a sample x is w·x, so its gradient is x ~ N(G, Σ)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samerun.step import Step
from samerun.step.noise import NoiseEstimate

DIMENSIONS = 50


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIMENSIONS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def samples(window: int, sizes: Sequence[int], gradient: float, trace: float) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 + window)
    mean = torch.full((DIMENSIONS,), gradient / math.sqrt(DIMENSIONS))
    spread = math.sqrt(trace / DIMENSIONS)
    return [mean + spread * torch.randn(size, DIMENSIONS, generator=rng) for size in sizes]


def run(step: Step, model: nn.Module, windows: range, sizes: Sequence[int], **known: Any) -> None:
    gradient, trace, bad = known.get("gradient", 0.5), known.get("trace", 20.0), known.get("bad", ())
    replica, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for number in windows:
        window = step.window(samples(number, sizes, gradient, trace)[replica::count])
        for x in window:
            loss = model(x).sum() * (math.nan if number in bad else 1.0)
            window.backward(loss, len(x))
        window.step()


def measured(
    num_windows: int,
    sizes: Sequence[int],
    *,
    precision: str = "fp32",
    every: int = 1,
    max_norm: float | None = None,
    **known: Any,
) -> NoiseEstimate:
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = Step(model, optimizer, precision=precision, noise_every=every, max_norm=max_norm)
    if precision == "fp16":
        state = step.state_dict()
        step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 2.0**6}})
    run(step, model, range(num_windows), sizes, **known)
    return step.noise()


def estimate_of(num_windows: int, cut: int | None) -> NoiseEstimate:
    model = Dot()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), noise_every=2)
    run(step, model, range(num_windows if cut is None else cut), [4, 4])
    if cut is not None:
        resumed = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), noise_every=2)
        resumed.load_state_dict(step.state_dict())
        run(resumed, model, range(cut, num_windows), [4, 4])
        step = resumed
    return step.noise()


def on_ranks(num_windows: int, sizes: Sequence[int]) -> dict[str, Any]:
    model = DistributedDataParallel(Dot())
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), noise_every=1)
    run(step, model, range(num_windows), sizes)
    return asdict(step.noise())


def under_fsdp(num_windows: int, sizes: Sequence[int], accumulate: str = "sharded") -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Dot())
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), noise_every=1, accumulate=accumulate)
    run(step, model, range(num_windows), sizes)
    return asdict(step.noise())


def together(num_windows: int, sizes: Sequence[int], num_replicas: int) -> dict[str, Any]:
    """One process, where microbatches that replicas run at the same moment are one: the oracle of the shards."""
    model = Dot()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), noise_every=1)
    for number in range(num_windows):
        parts = samples(number, sizes, 0.5, 20.0)
        window = step.window([torch.cat(parts[i : i + num_replicas]) for i in range(0, len(parts), num_replicas)])
        for x in window:
            window.backward(model(x).sum(), len(x))
        window.step()
    return asdict(step.noise())
