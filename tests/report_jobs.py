"""What ranks of the pool do for faults that users of other trainers reported: small sharded trainings, told to stop."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import samerun
from samerun.checkpoint import Store
from samerun.core.machine import resident_bytes
from samerun.errors import Refused, Stopped, UsageError
from samerun.state.fingerprint import tensor_digest
from samerun.state.model import Weights
from samerun.state.optimizer import OptimizerMemory
from samerun.step import Step

BATCHES = torch.randn(48, 7, generator=torch.Generator().manual_seed(1))


def bare(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))


def sharded(model: nn.Module, *, low: bool = False) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32) if low else None
    return fully_shard(model, mp_policy=policy) if policy else fully_shard(model)


def whole(tensor: torch.Tensor) -> str:
    return tensor_digest(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of every full tensor: weights, and what the optimizer remembers of them."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {}
    for name, parameter in inner.named_parameters():
        found[name] = whole(parameter.detach())
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def some_windows(
    path: str, until: int, *, low: bool = False, global_batch: int = 16, seed: int = 3
) -> list[dict[str, Any]]:
    """A sharded training from wherever it stands: what it holds at the first and the last edge, and a forward there."""
    model = sharded(bare(seed), low=low)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = samerun.Data(list(BATCHES), global_batch=global_batch, micro_batch=1, seed=1)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every="1000 updates", precision="model")
    edges: list[dict[str, Any]] = []

    def note() -> None:
        held = digests(model, optimizer)
        with torch.no_grad():
            probe = model(BATCHES[:3]).flatten().tolist()
        edges.append({"held": held, "probe": probe, "updates": int(run.progress.updates)})

    with run:
        for window in run.windows(until=until):
            if not edges:
                note()
            for batch in window:
                window.backward(((model(batch) - batch) ** 2).sum(), batch.numel())
            window.step()
        note()
    return [edges[0], edges[-1]]


def sharded_with_forwards(path: str, until: int, looks: bool) -> dict[str, Any]:
    """A sharded training that is looked at by forwards without gradients; they leave its parameters whole."""
    model = sharded(bare())

    def look() -> float:
        with torch.no_grad():
            return float(model(BATCHES[:3]).sum())

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if looks:
        look()
    data = samerun.Data(list(BATCHES), global_batch=6, micro_batch=1, seed=1)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every="1 updates", precision="model")
    with run:
        for window in run.windows(until=until):
            for batch in window:
                window.backward(((model(batch) - batch) ** 2).sum(), batch.numel())
            if looks:
                look()
            window.step()
            if looks:
                run.evaluate("sum", look)
    return digests(model, optimizer)


def steps_with_forwards(look: bool) -> list[str]:
    """As someone's own loop does: a look at the loss between the backward and the update."""
    model = sharded(bare())
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for number in range(3):
        window = step.window([BATCHES[6 * number + 2 * dist.get_rank() :][:2]])
        for batch in window:
            window.backward(((model(batch) - batch) ** 2).sum(), batch.numel())
        if look:
            with torch.no_grad():
                model(BATCHES[:3])
        losses.append(repr(window.step().loss))
    return losses


def large(path: str) -> samerun.Run:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = samerun.Data(list(torch.randn(4, 1024)), global_batch=1, micro_batch=1, seed=1)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every="1000 updates", health="off")
    run.model = model  # type: ignore[attr-defined]
    return run


def large_saved(path: str) -> None:
    with large(path) as run:
        for window in run.windows(until=1):
            for batch in window:
                window.backward(run.model(batch).square().sum(), 1)  # type: ignore[attr-defined]
            window.step()


def large_resumed(path: str) -> dict[str, int]:
    """Bytes that a start holds more than before it, and how far above that it ever came."""
    run = large(path)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
    before = resident_bytes()
    with run:
        after = resident_bytes()
        assert before is not None and after is not None
        return {"held": after[0] - before[0], "above": after[1] - after[0]}


def warm_started_after_a_forward(path: str) -> dict[str, str]:
    model = sharded(bare(99))
    with torch.no_grad():
        model(BATCHES[:3])
    samerun.warm_start(path, model=model)
    model.reshard()  # type: ignore[operator]  # as the next backward does
    return digests(model, torch.optim.SGD(model.parameters(), lr=0.1))


def before_and_after_wrapping(path: str) -> dict[str, Any]:
    """Weights and memory of a checkpoint, loaded into a sharded model, and into a bare one that is sharded then."""
    entry = Store(path).catalog().entries[0]
    found: dict[str, Any] = {}
    for order in ("wrapped", "bare"):
        model: nn.Module = bare(99)
        if order == "wrapped":
            model = sharded(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Store(path).open(entry) as checkpoint:
            models = {"model": model}
            Weights(models).restore(checkpoint.source("weights"))
            for steps in (False, True):
                memory = OptimizerMemory({"model": optimizer}, models, steps=steps)
                memory.restore(checkpoint.source(memory.name))
        found[order] = digests(model, optimizer)
        if order == "bare":
            found["then wrapped"] = digests(sharded(model), torch.optim.AdamW(model.parameters(), lr=0.1))
    model = bare(99)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = samerun.Data(list(BATCHES), global_batch=16, micro_batch=1, seed=1)
    try:
        with samerun.Run(path, model=sharded(model), optimizer=early, data=data, precision="model"):
            found["optimizer first"] = "went on"
    except (UsageError, Refused) as error:
        found["optimizer first"] = str(error)
    return found


def told_at_any_time(path: str, trials: int, seed: int) -> list[Any]:
    """Starts again and again; in each, one rank is sent a SIGTERM at a random moment. How each of them ended."""
    ends = []
    for trial in range(trials):
        draw = random.Random(seed * 1000 + trial)  # the same on every rank
        struck, seconds = draw.randrange(dist.get_world_size()), draw.uniform(0, 0.06)
        model = DistributedDataParallel(bare())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = samerun.Data(list(BATCHES), global_batch=4, micro_batch=1, seed=1)
        run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every="7 updates", health="off")
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
        try:
            with run:
                if dist.get_rank() == struck:
                    timer.start()
                for window in run.windows(until=10**9):
                    for batch in window:
                        window.backward(((model(batch) - batch) ** 2).sum(), batch.numel())
                    window.step()
        except Stopped as stopped:
            ends.append([stopped.reason.partition(" (")[0], stopped.code])
        timer.cancel()
    return ends
