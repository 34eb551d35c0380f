"""What a window has heard so far, against exact sums: any number of microbatches, weights of host and device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from samerun.step.parallel.agree import Tally

Weight = torch.Tensor | float


def told(pairs: Sequence[tuple[float, Weight]]) -> tuple[float, float, int]:
    tally = Tally(torch.device("cpu"))
    for loss, weight in pairs:
        tally.add(torch.tensor(loss, dtype=torch.float32), weight)
    weight, loss_sum, num_bad = tally.sums()
    return float(weight), float(loss_sum), int(num_bad)


@pytest.mark.parametrize("kind", ["host", "tensor", "host first", "tensor first", "in turn"])
@pytest.mark.parametrize("number", [0, 1, 2, 7, 63, 64, 65, 128, 130])
def test_sums_are_those_of_all_microbatches(number: int, kind: str) -> None:
    on_host = {"host": lambda i: True, "tensor": lambda i: False, "host first": lambda i: i < number // 2,
               "tensor first": lambda i: i >= number // 2, "in turn": lambda i: i % 2 == 0}[kind]  # fmt: skip
    losses, weights = [float(2**20 + i) for i in range(number)], [float(3 * i + 1) for i in range(number)]
    pairs = [
        (loss, weight if on_host(i) else torch.tensor(weight, dtype=torch.float32))
        for i, (loss, weight) in enumerate(zip(losses, weights, strict=True))
    ]
    assert told(pairs) == (math.fsum(weights), math.fsum(losses), 0)


@pytest.mark.parametrize("at", [0, 5, 64, 69])
def test_a_bad_loss_counts_and_its_weight_stays(at: int) -> None:
    pairs: list[tuple[float, Weight]] = [(1.0, 2.0)] * 70
    pairs[at] = (math.nan, 2.0)
    assert told(pairs) == (140.0, 69.0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_bad_weight_of_a_device_counts_and_is_left_out(bad: float) -> None:
    pairs: list[tuple[float, Weight]] = [(1.0, 2.0), (1.0, torch.tensor(bad)), (1.0, torch.tensor(2.0))]
    assert told(pairs) == (4.0, 3.0, 1)


def test_no_microbatchs_memory_is_kept() -> None:
    """A few bytes between two microbatches' activations keep the allocator from joining the room around them."""
    tally = Tally(torch.device("cpu"))
    loss, weight = torch.ones(()), torch.ones(())
    kept = [StorageWeakRef(value.untyped_storage()) for value in (loss, weight)]
    tally.add(loss, weight)
    del loss, weight
    assert [reference.expired() for reference in kept] == [True, True]
    assert float(tally.sums()[0]) == 1.0
