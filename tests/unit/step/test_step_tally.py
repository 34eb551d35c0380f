"""What a window has heard so far, against exact sums: any number of microbatches, weights of host and device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from samerun.ranks.topology import Topology, Wrapping
from samerun.step.parallel.agree import Flags, Local, Share, Sums, Tally, _without_bad, agree

Weight = torch.Tensor | float
SOLO = Topology(rank=0, world_size=1, replica=0, num_replicas=1, leads=True, wrapping=Wrapping.SOLO)


def heard(pairs: Sequence[tuple[float, Weight]]) -> Sums:
    tally = Tally(torch.device("cpu"))
    for loss, weight in pairs:
        tally.add(torch.tensor(loss, dtype=torch.float32), weight)
    return tally.sums()


def told(pairs: Sequence[tuple[float, Weight]]) -> tuple[float, float, int]:
    """(weight, loss, number of bad ranks) as one process agrees with itself, and as it would tell its peers."""
    one = torch.ones((), dtype=torch.float64)
    share = Share(sums=heard(pairs), num_samples=0, coverage=0, flags=Flags())
    agreed = agree(share, Local(squared_norm=one, scale=one), topology=SOLO, device=torch.device("cpu"))
    alone = (agreed.weight, agreed.loss_sum, agreed.num_bad_ranks)
    assert tuple(float(number) for number in _without_bad(heard(pairs))) == alone
    return alone


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


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]])
@pytest.mark.parametrize("at", [0, 5, 64, 68])
def test_a_bad_loss_shows_and_its_weight_stays(at: int, bad: list[float]) -> None:
    pairs: list[tuple[float, Weight]] = [(1.0, 2.0)] * 70
    pairs[at : at + len(bad)] = [(one, 2.0) for one in bad]
    assert told(pairs) == (140.0, 0.0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_weight_of_a_device_shows_and_the_rank_adds_nothing(at: int, bad: float) -> None:
    pairs: list[tuple[float, Weight]] = [(1.0, 2.0), (1.0, torch.tensor(2.0))]
    pairs.insert(at, (1.0, torch.tensor(bad)))
    assert told(pairs) == (0.0, 0.0, 1)


def test_no_microbatchs_memory_is_kept() -> None:
    """A few bytes between two microbatches' activations keep the allocator from joining the room around them."""
    tally = Tally(torch.device("cpu"))
    loss, weight = torch.ones(()), torch.ones(())
    kept = [StorageWeakRef(value.untyped_storage()) for value in (loss, weight)]
    tally.add(loss, weight)
    del loss, weight
    assert [reference.expired() for reference in kept] == [True, True]
    assert float(tally.sums().weight) == 1.0
