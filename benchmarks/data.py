"""The data's figures: looking up the order, coming back far into a run, the size of what is saved.

    python benchmarks/data.py [--rounds 5] [--json]

`StatefulDataLoader` (torchdata) stands beside the resume where it is installed: it walks over what was consumed, so
it is measured at a position that it reaches within a second or so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import samerun
from samerun.data.order import Order

NUM_SAMPLES = 10**10
POSITION = 10**9
STATEFUL_BATCHES = 20_000


class Numbers:
    """A dataset that counts how often it is opened."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.num_opened = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> torch.Tensor:
        self.num_opened += 1
        return torch.tensor(sample)


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def lookups(rounds: int) -> dict[str, float]:
    order = Order(num_samples=NUM_SAMPLES, seed=7)
    offsets = np.random.default_rng(0).integers(0, NUM_SAMPLES, 10**6)
    epochs = np.zeros(len(offsets), np.int64)
    return {"seconds": median_seconds(lambda: order.lookup(epochs, offsets), rounds)}


def resume(rounds: int) -> dict[str, Any]:
    dataset = Numbers(NUM_SAMPLES)

    def source() -> samerun.Data:
        return samerun.Data(dataset, global_batch=100, micro_batch=10, seed=7)

    state = source().state_dict()
    state |= {"position": POSITION, "samples": POSITION, "windows": POSITION // 100}
    state = json.loads(json.dumps(state))

    def first_batch() -> None:
        with source() as data:
            data.load_state_dict(state)
            window = next(data.windows())
            assert window.start == POSITION
            next(iter(window))

    first_batch()
    dataset.num_opened = 0
    seconds = median_seconds(first_batch, rounds)
    return {
        "first batch, seconds": seconds,
        "samples opened": dataset.num_opened / rounds,
        "state, bytes": len(json.dumps(state)),
    }


def stateful() -> dict[str, Any] | None:
    """torchdata's loader at a position that it can reach: shuffled, no workers, batches of 10."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return None

    def loader() -> Any:
        return StatefulDataLoader(Numbers(10**6), batch_size=10, shuffle=True)

    first = loader()
    batches = iter(first)
    for _ in range(STATEFUL_BATCHES):
        next(batches)
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    began = time.perf_counter()
    next(iter(again))
    seconds = time.perf_counter() - began
    position = STATEFUL_BATCHES * 10
    return {
        f"first batch at position {position} of 10^6, seconds": seconds,
        "state, elements and bytes of tensors": sum(_sizes(state)),
    }


def _sizes(state: Any) -> list[int]:
    if isinstance(state, torch.Tensor):
        return [state.numel() * state.element_size()]
    if isinstance(state, dict):
        return [size for value in state.values() for size in _sizes(value)]
    if isinstance(state, list | tuple):
        return [size for value in state for size in _sizes(value)]
    return [len(state)] if isinstance(state, bytes) else [8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {
        "cores": len(os.sched_getaffinity(0)),
        "load average": os.getloadavg()[0],
        "10^6 lookups at N = 10^10": lookups(options.rounds),
        "resume at position 10^9": resume(options.rounds),
        "StatefulDataLoader": stateful() or "torchdata is not installed",
    }
    sys.stdout.write(json.dumps(figures, indent=None if options.json else 2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
