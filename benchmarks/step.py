"""What a window costs beside the same loop written by hand: CPU time, reads by the host, memory.

    python benchmarks/step.py [--windows 120] [--json]

A small GPT, fp16 autocast with a GradScaler, four microbatches a window, clipping, a learning-rate curve, batches of a
dataset: by hand with torch's DataLoader and GradScaler, with `samerun.Run`, and with `samerun.step.Step` over that
DataLoader. They take turns in one process, one window each, in an order that changes; CPU time is the whole process's,
threads included, and the difference is the median over rounds: of whole windows, and of what is outside forward and
backward, which are the same work everywhere and vary by more than all the rest. Health, journal and ledger are as
`Run` has them by default, so the difference of `Run` holds its data, too.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import io
import itertools
import json
import math
import os
import pstats
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import samerun
from samerun.demo.model import GPT, Shape, token_loss
from samerun.step import Step
from samerun.step.schedule import WarmupCosine

NUM_MICROBATCHES = 4
WARMUP, TOTAL = 10, 10**6
SIZES = {
    "small GPT": (Shape(width=64, num_layers=2, length=48), 1),
    "tiny GPT (nearly nothing but the loop)": (Shape(width=16, num_layers=2, length=8, num_heads=2), 1),
}
"""Name → (shape, samples in a microbatch)."""


class Lane:
    """One way to train: a model of its own, and a window at a time."""

    def __init__(self, shape: Shape, micro_batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        tokens = torch.randint(shape.vocabulary, (4096, shape.length + 1))
        self.dataset = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.micro_batch = micro_batch


def by_hand(lane: Lane) -> Iterator[float]:
    """The loop as people write it; the loss is read once a window, for the log."""
    scaler = torch.amp.GradScaler("cpu")
    curve = torch.optim.lr_scheduler.LambdaLR(
        lane.optimizer, lambda n: min(1.0, (n + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * n / TOTAL))
    )
    loader = DataLoader(lane.dataset, batch_size=lane.micro_batch, shuffle=True, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    while True:
        lane.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        num_tokens = NUM_MICROBATCHES * lane.micro_batch * lane.dataset[0][0].numel()
        for batch in itertools.islice(batches, NUM_MICROBATCHES):
            with torch.autocast("cpu", dtype=torch.float16):
                loss_sum, _ = token_loss(lane.model, batch)
            scaler.scale(loss_sum / num_tokens).backward()
            total += loss_sum.detach()
        scaler.unscale_(lane.optimizer)
        torch.nn.utils.clip_grad_norm_(lane.model.parameters(), 1.0)
        scaler.step(lane.optimizer)
        scaler.update()
        curve.step()
        yield float(total) / num_tokens


def with_run(lane: Lane, path: Path) -> Iterator[float]:
    data = samerun.Data(
        lane.dataset, global_batch=NUM_MICROBATCHES * lane.micro_batch, micro_batch=lane.micro_batch, seed=0
    )
    run = samerun.Run(
        path, model=lane.model, optimizer=lane.optimizer, scheduler=WarmupCosine(warmup=WARMUP, total=TOTAL),
        data=data, precision="fp16", max_norm=1.0, save_every=f"{TOTAL} updates",
    )  # fmt: skip
    with run:
        for window in run.windows(until=TOTAL):
            for batch in window:
                window.backward(*token_loss(lane.model, batch))
            yield window.step().loss


def with_step(lane: Lane) -> Iterator[float]:
    step = Step(
        lane.model, lane.optimizer, scheduler=WarmupCosine(warmup=WARMUP, total=TOTAL), precision="fp16", max_norm=1.0
    )
    loader = DataLoader(lane.dataset, batch_size=lane.micro_batch, shuffle=True, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    while True:
        window = step.window(list(itertools.islice(batches, NUM_MICROBATCHES)))
        for batch in window:
            window.backward(*token_loss(lane.model, batch))
        yield window.step().loss


def lanes(shape: Shape, micro_batch: int, folder: Path) -> dict[str, Iterator[float]]:
    return {
        "by hand": by_hand(Lane(shape, micro_batch)),
        "Run": with_run(Lane(shape, micro_batch), folder / f"run-{shape.width}"),
        "Step": with_step(Lane(shape, micro_batch)),
    }


class Model:
    """CPU seconds inside forwards and backwards, for whoever wants to know what the loop around them costs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._backward = torch.autograd.backward

    def __enter__(self) -> Model:
        torch.autograd.backward = self._timed(self._backward)
        globals()["token_loss"] = self._timed(token_loss)
        return self

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward = self._backward
        globals()["token_loss"] = token_loss.__wrapped__

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return work(*arguments, **options)
            finally:
                self.seconds += time.process_time() - began

        return timed


def cpu_times(ways: dict[str, Iterator[float]], num_windows: int) -> dict[str, Any]:
    """Milliseconds of CPU a window, and what each way adds to the one by hand: medians with quartiles."""
    names = list(ways)
    for _, way in itertools.product(range(5), ways.values()):
        next(way)
    whole: dict[str, list[float]] = {name: [] for name in names}
    around: dict[str, list[float]] = {name: [] for name in names}
    orders = list(itertools.permutations(names))
    with Model() as model:
        for turn in range(num_windows):
            for name in orders[turn % len(orders)]:
                began, inside = time.process_time(), model.seconds
                next(ways[name])
                taken = time.process_time() - began
                whole[name].append(taken * 1e3)
                around[name].append((taken - (model.seconds - inside)) * 1e3)
    found: dict[str, Any] = {}
    for what, times in (("a window", whole), ("outside forward and backward", around)):
        found |= {f"{name}, ms {what}": round(statistics.median(times[name]), 3) for name in names}
        for name in names[1:]:
            added = [mine - theirs for mine, theirs in zip(times[name], times["by hand"], strict=True)]
            low, middle, high = statistics.quantiles(added, n=4)
            found[f"{name} adds, ms {what}"] = {
                "median": round(middle, 3),
                "quartiles": [round(low, 3), round(high, 3)],
            }
    return found


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device, outside the user's own code."""

    WAITS = ("_local_scalar_dense", "nonzero", "_to_copy.host")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in self.WAITS and not _in_optimizer():
            self.count[name] += 1
        return function(*args, **(kwargs or {}))


def _in_optimizer() -> bool:
    """AdamW on a CPU reads its own step counters, by hand too; on a device they stay there."""
    frame: Any = sys._getframe()
    while frame is not None:
        if "torch/optim" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def host_reads(way: Iterator[float]) -> float:
    """A window's, from one edge to the next. `tolist` is one read that torch does not dispatch: counted apart."""
    lists = 0
    original = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal lists
        lists += 1
        return original(tensor)

    next(way)
    torch.Tensor.tolist = counted  # type: ignore[method-assign]
    try:
        with HostReads() as seen:
            for _ in range(4):
                next(way)
    finally:
        torch.Tensor.tolist = original  # type: ignore[method-assign]
    return (sum(seen.count.values()) + lists) / 4


def peak_bytes(num_microbatches: int) -> int:
    """Of a process that trains 64 microbatches, so many a window."""
    code = f"import runpy, sys; m = runpy.run_path({str(Path(__file__))!r}); m['train_for_memory']({num_microbatches})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def train_for_memory(num_microbatches: int) -> None:
    torch.set_num_threads(1)
    lane = Lane(Shape(width=128, num_layers=2, length=64), 8)
    data = samerun.Data(lane.dataset, global_batch=num_microbatches * 8, micro_batch=8)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(io.StringIO()),
        samerun.Run(folder, model=lane.model, optimizer=lane.optimizer, data=data, save_every="1000 updates") as run,
    ):
        for window in run.windows(until=64 // num_microbatches):
            for batch in window:
                window.backward(*token_loss(lane.model, batch))
            window.step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(str(peak))


def profile(way: Callable[[], Iterator[float]], num_windows: int) -> str:
    lane, profiler, text = way(), cProfile.Profile(), io.StringIO()
    next(lane)
    profiler.enable()
    for _ in range(num_windows):
        next(lane)
    profiler.disable()
    pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats("samerun", 45)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--windows", type=int, default=120)
    parser.add_argument("--profile", action="store_true", help="where the time of Run's windows goes, and nothing else")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="samerun-bench-"))
    if options.profile:
        shape, micro_batch = list(SIZES.values())[1]
        sys.stdout.write(profile(lambda: with_run(Lane(shape, micro_batch), folder / "run"), options.windows))
        return
    figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load average": os.getloadavg()[0]}
    for name, (shape, micro_batch) in SIZES.items():
        ways = lanes(shape, micro_batch, folder)
        figures[name] = cpu_times(ways, options.windows)
        figures[name]["reads by the host, a window"] = {key: host_reads(way) for key, way in ways.items()}
        for way in ways.values():
            way.close()  # type: ignore[attr-defined]
    few, many = peak_bytes(2), peak_bytes(32)
    figures["peak memory"] = {"K=2, MB": few / 1e6, "K=32, MB": many / 1e6, "K=32 / K=2": many / few}
    shutil.rmtree(folder)
    sys.stdout.write(json.dumps(figures, indent=None if options.json else 2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
