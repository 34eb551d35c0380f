"""What health costs and what it finds: CPU time a window, memory, bytes a window, delay of detection, false alarms.

    python benchmarks/health.py [--windows 3000] [--noise 100000] [--json]

The monitor of one rank without a training around it, so that nothing but health is measured; CPU time of the thread
that trains. The CPU time is a median of batches of windows: a busy machine makes it longer, never shorter. Each limit
is stated beside its figure; exit 1 when one is exceeded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samerun.core.events import Journal
from samerun.health.monitor import Decided, Monitor, Surroundings
from samerun.health.options import HealthOptions
from samerun.health.records.event import MAX_LINE_BYTES
from samerun.health.records.flight import CAPACITY
from samerun.health.spike.detector import Kind, SpikeDetector
from samerun.ranks.group import Solo

CPU_LIMIT_MS = 0.3
MEMORY_LIMIT_BYTES = 2 * 2**20
DELAY_LIMIT_WINDOWS = 1
_BATCH = 100


class Window:
    """What the monitor needs of a run's window of data: two microbatches that cost nothing."""

    num_microbatches, slots = 2, 2

    def __init__(self, index: int) -> None:
        self.index = index

    def __iter__(self) -> Iterator[int]:
        return iter((0, 1))


def decided(window: int, loss: float, grad_norm: float) -> Decided:
    return Decided(
        window=window, start=64 * window, end=64 * window + 64, coverage=2**64 - 1 - window, samples=64,
        weight=123_456.0, loss=loss, grad_norm=grad_norm, lr=3e-4, scale=65_536.0, outcome="updated", is_loss_bad=False,
    )  # fmt: skip


def monitor(folder: Path) -> Monitor:
    around = Surroundings(
        folder=folder, attempt=1, group=Solo(), journal=Journal(folder / "journal.jsonl"), tell=lambda line: None,
        is_separable=True, span=None, memory_bytes=lambda: 2**33, keeper=None, autocast=contextlib.nullcontext,
        checksums=None, options=HealthOptions(),
    )  # fmt: skip
    return Monitor(around, SpikeDetector())


def turn(health: Monitor, window: int, loss: float, grad_norm: float) -> None:
    for _ in health.begin(Window(window)):
        health.at(f"window:{window}.microbatch:0")
    health.at(f"window:{window}.last_backward")
    health.at(f"window:{window}.step")
    health.decided(decided(window, loss, grad_norm))
    health.edge(window + 1)


def cost(num_windows: int, folder: Path) -> dict[str, Any]:
    """CPU time a window once the baseline is full and the threshold calibrated, and bytes a window on disk."""
    draws, health = random.Random(1), monitor(folder)
    for window in range(1000):
        turn(health, window, 2.5 + draws.gauss(0, 0.03), math.exp(draws.gauss(-0.7, 0.1)))
    spent = []
    for batch in range(num_windows // _BATCH):
        values = [(2.5 + draws.gauss(0, 0.03), math.exp(draws.gauss(-0.7, 0.1))) for _ in range(_BATCH)]
        before = time.thread_time()
        for number, (loss, norm) in enumerate(values):
            turn(health, 1000 + batch * _BATCH + number, loss, norm)
        spent.append((time.thread_time() - before) / _BATCH * 1e3)
    health.close()
    lines = (folder / "rank-00000.windows.jsonl").read_bytes().splitlines()[1:]
    return {
        "cpu_ms_a_window": statistics.median(spent),
        "cpu_ms_quartiles": statistics.quantiles(spent, n=4)[::2],
        "bytes_a_window": statistics.mean(len(line) + 1 for line in lines),
        "most_bytes_a_window": max(len(line) + 1 for line in lines),
    }


def memory(folder: Path) -> int:
    """Python's own memory that a full recorder, detector and monitor hold, bytes; the same after ten times as long."""
    draws = random.Random(2)
    tracemalloc.start()
    health = monitor(folder)
    held = []
    for window in range(10 * CAPACITY):
        turn(health, window, 2.5 + draws.gauss(0, 0.03), 0.5)
        if window in (2 * CAPACITY, 10 * CAPACITY - 1):
            time.sleep(0.2)  # the writer's queue empties; it is bounded by itself
            held.append(tracemalloc.get_traced_memory()[0])
    health.close()
    tracemalloc.stop()
    return max(held)


def delay() -> int:
    """Windows from a threefold loss to the alarm, after 1000 ordinary ones; the worst of 20 runs, -1 for none."""
    worst = 0
    for seed in range(20):
        draws, detector, found = random.Random(seed), SpikeDetector(), -1
        for window in range(1010):
            factor = 3.0 if window >= 1000 else 1.0
            findings = detector.after(
                window=window, loss=factor * (2.5 + draws.gauss(0, 0.03)), grad_norm=math.exp(draws.gauss(-0.7, 0.1))
            )
            if window >= 1000 and any(one.kind is Kind.SPIKE for one in findings):
                found = window - 1000
                break
        if found < 0:
            return -1
        worst = max(worst, found)
    return worst


def noises(draws: random.Random) -> dict[str, Callable[[], float]]:
    state = [0.0]

    def ar1() -> float:
        state[0] = 0.7 * state[0] + math.sqrt(1 - 0.49) * draws.gauss(0, 1)
        return state[0]

    def laplace() -> float:
        return draws.expovariate(1.0) * draws.choice((-1, 1)) / math.sqrt(2)

    return {"Gaussian": lambda: draws.gauss(0, 1), "AR(1) 0.7": ar1, "Laplace": laplace}


def false_alarms(num_windows: int) -> dict[str, dict[str, int]]:
    """Spikes and drifts that ordinary noise raises, over both series."""
    counts = {}
    for name in noises(random.Random(0)):
        draws = random.Random(3)
        loss, norm, detector = noises(draws)[name], noises(draws)[name], SpikeDetector()
        count = {"spike": 0, "drift": 0}
        for window in range(num_windows):
            found = detector.after(window=window, loss=2.5 + 0.03 * loss(), grad_norm=math.exp(0.1 * norm() - 0.7))
            for one in found:
                if one.kind in (Kind.SPIKE, Kind.DRIFT):
                    count[one.kind.value] += 1
        counts[name] = count
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=3000)
    parser.add_argument("--noise", type=int, default=100_000, help="windows of each kind of noise")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = {
            "load": os.getloadavg()[0],
            **cost(options.windows, Path(place) / "cost"),
            "memory_bytes": memory(Path(place) / "memory"),
            "delay_windows": delay(),
            "noise_windows": options.noise,
            "false_alarms": false_alarms(options.noise),
        }
    failed = [
        name
        for name, is_over in (
            ("CPU time", found["cpu_ms_a_window"] > CPU_LIMIT_MS),
            ("bytes a window", found["most_bytes_a_window"] > MAX_LINE_BYTES),
            ("memory", found["memory_bytes"] > MEMORY_LIMIT_BYTES),
            ("delay", not 0 <= found["delay_windows"] <= DELAY_LIMIT_WINDOWS),
        )
        if is_over
    ]
    if options.json:
        print(json.dumps({**found, "over": failed}, indent=1))
        return int(bool(failed))
    low, high = found["cpu_ms_quartiles"]
    print(f"CPU time      {found['cpu_ms_a_window']:.3f} ms a window ({low:.3f} … {high:.3f}), limit {CPU_LIMIT_MS}")
    print(f"journal       {found['bytes_a_window']:.0f} bytes a window, most {found['most_bytes_a_window']}, limit 300")
    print(f"memory        {found['memory_bytes'] / 2**20:.2f} MiB, limit {MEMORY_LIMIT_BYTES / 2**20:g}")
    print(f"detection     a threefold loss after {found['delay_windows']} windows, limit {DELAY_LIMIT_WINDOWS}")
    for name, count in found["false_alarms"].items():
        print(f"false alarms  {name}: {count['spike']} spikes, {count['drift']} drifts in {options.noise} windows")
    print(f"load {found['load']:.1f}" + (f"; OVER THE LIMIT: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
