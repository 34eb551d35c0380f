"""The gradient of a window is that of one big batch, however it is cut and spread; naive means are not."""

from __future__ import annotations

import pytest
import torch

from rank_pool import RankPool
from step_jobs import batches, big_batch, flat, loss_sum, net, one_window

COUNTS = (7, 1, 3, 5)
TOLERANCE = 1e-12
"""Everything is float64: what is left is the order of additions."""


def naive_mean(counts: tuple[int, ...]) -> torch.Tensor:
    """The control: the mean of each microbatch's mean."""
    model = net()
    for batch in batches(counts):
        (loss_sum(model, batch) / len(batch[1]) / len(counts)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return torch.tensor(flat(model), dtype=torch.float64)


def distance(one: list[float], other: torch.Tensor) -> float:
    return float((torch.tensor(one, dtype=torch.float64) - other).abs().max())


def test_naive_means_are_another_gradient() -> None:
    for counts in (COUNTS, (1, 15), (1, 3)):
        expected, _, _ = big_batch(counts)
        assert float((naive_mean(counts) - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("counts", [COUNTS, (16,), (1,), (1, 15), (2,) * 8, (13, 0, 7)])
@pytest.mark.parametrize("tensor_weight", [False, True])
def test_one_process(counts: tuple[int, ...], tensor_weight: bool) -> None:
    expected, loss, norm = big_batch(counts)
    got = one_window("solo", counts, tensor_weight=tensor_weight)
    assert distance(got["parameters"], expected) <= TOLERANCE
    assert got["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert got["norm"] == pytest.approx(norm, abs=TOLERANCE)
    assert got["weight"] == sum(counts)


CASES = {
    2: [
        ("ddp", COUNTS, "sharded"),
        ("ddp", (1, 15), "sharded"),
        ("ddp", (7, 1, 3, 5, 2), "sharded"),
        ("fsdp", COUNTS, "sharded"),
        ("fsdp", COUNTS, "unsharded"),
        ("fsdp", (1, 15), "sharded"),
        ("fsdp", (7, 1, 3), "sharded"),
        ("fsdp", (7, 1, 3), "unsharded"),
        ("fsdp", (7, 0, 3), "sharded"),
    ],
    3: [
        ("ddp", (7, 1, 3, 5, 4), "sharded"),
        ("fsdp", (7, 1, 3, 5), "sharded"),
        ("fsdp", (7, 1, 3, 5, 2, 6, 4), "unsharded"),
    ],
    4: [
        ("ddp", (7, 1, 3, 5, 4), "sharded"),
        ("fsdp", (7, 1, 3, 5, 13, 2), "sharded"),
        ("tp", COUNTS, "sharded"),
        ("tp", (7, 1, 3), "sharded"),
        ("tp", (7, 1, 3), "unsharded"),
    ],
}


@pytest.mark.parametrize("world_size", sorted(CASES))
def test_replicas(ranks: RankPool, world_size: int) -> None:
    cases = [{"wrap": w, "counts": c, "accumulate": a} for w, c, a in CASES[world_size]]
    answers = ranks.run(world_size, "step_jobs:many_windows", cases=cases)
    for number, (wrap, counts, accumulate) in enumerate(CASES[world_size]):
        expected, loss, norm = big_batch(counts)
        for rank in range(world_size):
            got = answers[rank][number]
            where = f"{wrap} {accumulate} {counts} rank {rank} of {world_size}"
            assert distance(got["parameters"], expected) <= TOLERANCE, where
            assert got["loss"] == pytest.approx(loss, abs=TOLERANCE), where
            assert got["norm"] == pytest.approx(norm, abs=TOLERANCE), where
            assert got["weight"] == sum(counts), where
            assert got["parameters"] == answers[0][number]["parameters"], where


def test_tensor_parallel_peers_are_no_replicas(ranks: RankPool) -> None:
    """Two of four ranks hold one replica together: its tokens count once."""
    answers = ranks.run(4, "step_jobs:one_window", wrap="tp", counts=[4, 9])
    assert [answer["weight"] for answer in answers] == [13.0] * 4


def test_4800_and_9600_tokens() -> None:
    """Replica means 1.0 and 4.0 over 4,800 and 9,600 tokens: 3.0 by tokens, 2.5 by replicas."""
    losses, tokens = (1.0, 4.0), (4800, 9600)
    weight = torch.nn.Parameter(torch.zeros(()))
    from samerun.step import Step

    step = Step(_Holder(weight), torch.optim.SGD([weight], lr=1.0))
    window = step.window(list(zip(losses, tokens, strict=True)))
    for mean, count in window:
        window.backward(mean=mean + weight * mean, weight=count)
    outcome = window.step()
    assert outcome.loss == 3.0
    assert float(weight.detach()) == -3.0
    assert sum(losses) / 2 == 2.5 != outcome.loss


class _Holder(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
