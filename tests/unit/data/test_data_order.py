import hashlib
import time

import numpy as np
import pytest

from samerun.data import order as order_module
from samerun.data.order import EXACT_SHUFFLE_MAX, Order


def one_epoch(num_samples: int, *, seed: int = 7, epoch: int = 0) -> list[int]:
    offsets = np.arange(num_samples)
    return Order(num_samples=num_samples, seed=seed).lookup(np.full(num_samples, epoch), offsets).tolist()


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 13, 399, 997, 4096, 65_536, 65_537, 100_003])
def test_each_epoch_is_a_permutation(num_samples: int) -> None:
    for epoch in (0, 1, 5):
        assert sorted(one_epoch(num_samples, epoch=epoch)) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 13, 36, 37, 255, 997])
def test_feistel_is_a_bijection_of_any_length(num_samples: int) -> None:
    keys = tuple(range(8))
    image = order_module._walk(np.arange(num_samples, dtype=np.uint64), num_samples, keys)
    assert sorted(image.tolist()) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [70_001, 10**12])
def test_feistel_agrees_with_plain_integers(num_samples: int) -> None:
    """The oracle is the formula of the module docstring in Python integers, one sample at a time."""
    seed, epoch = 7, 3
    keys = [
        int.from_bytes(
            hashlib.blake2b(
                f"samerun.permutation.v1|feistel|{seed}|{epoch}|{num_samples}|{r}".encode(), digest_size=8
            ).digest(),
            "little",
        )
        for r in range(8)
    ]

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    high = next(a for a in range(int(num_samples**0.5) - 2, num_samples) if a * a >= num_samples)
    low = -(-num_samples // high)

    def place(x: int) -> int:
        while True:
            left, right = divmod(x, low)
            for r, key in enumerate(keys):
                if r % 2 == 0:
                    left = (left + mix((right + key) % 2**64)) % high
                else:
                    right = (right + mix((left + key) % 2**64)) % low
            x = left * low + right
            if x < num_samples:
                return x

    offsets = np.array([0, 1, 2, 12_345, num_samples // 2, num_samples - 1])
    found = Order(num_samples=num_samples, seed=seed).lookup(np.full(6, epoch), offsets)
    assert found.tolist() == [place(x) for x in offsets.tolist()]


def test_small_orders_are_equally_likely() -> None:
    """Chi-squared over all 24 orders of 4 samples: 23 degrees of freedom, 99.99 % quantile 57.1."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        key = tuple(one_epoch(4, seed=seed))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 57.1


@pytest.mark.parametrize("num_samples", [EXACT_SHUFFLE_MAX, 10**6])
def test_neighbours_and_places_are_uncorrelated(num_samples: int) -> None:
    order = np.array(one_epoch(num_samples), float)
    noise = 5 / num_samples**0.5  # five standard errors of a correlation of independent values
    assert abs(np.corrcoef(order, np.arange(num_samples))[0, 1]) < noise
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < noise


@pytest.mark.parametrize("num_samples", [97, 70_001])
def test_epochs_and_seeds_have_orders_of_their_own(num_samples: int) -> None:
    """Additive keys would make seed 6, epoch 0 equal to seed 5, epoch 1."""
    orders = {tuple(one_epoch(num_samples, seed=s, epoch=e)) for s in (0, 5, 6, -1) for e in (0, 1, 2)}
    assert len(orders) == 12


@pytest.mark.parametrize("num_samples", [7, 70_001])
def test_mixed_epochs_equal_one_epoch_at_a_time(num_samples: int) -> None:
    rng = np.random.default_rng(0)
    epochs, offsets = rng.integers(0, 4, 500), rng.integers(0, num_samples, 500)
    order = Order(num_samples=num_samples, seed=3)
    single = [order.lookup(epochs[i : i + 1], offsets[i : i + 1])[0] for i in range(500)]
    assert order.lookup(epochs, offsets).tolist() == single


def test_the_order_of_version_1_never_changes() -> None:
    """Golden values: a run that was saved must find the same samples with any later release."""
    assert one_epoch(10) == GOLDEN_TEN
    large = Order(num_samples=10**10, seed=7).lookup(np.full(3, 2), np.array([0, 1, 9_999_999_999]))
    assert large.tolist() == GOLDEN_LARGE


GOLDEN_TEN = [9, 2, 7, 4, 6, 0, 3, 5, 1, 8]
GOLDEN_LARGE = [9831507163, 826985913, 2971815701]


def test_a_million_lookups_far_away_are_fast() -> None:
    offsets = np.random.default_rng(0).integers(0, 10**10, 10**6)
    order, epochs = Order(num_samples=10**10, seed=1), np.zeros(10**6, np.int64)
    best = 9.0
    for _ in range(5):
        begin = time.process_time()
        order.lookup(epochs, offsets)
        best = min(best, time.process_time() - begin)
    assert best < 0.5  # the figure is 0.1 s and is measured by the bench; a shared machine gets slack here


def test_draws_in_the_ragged_top_are_drawn_again_from_other_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """So rare that no seed shows it: the first draws are bent to the top of 2^64."""
    real, seen = order_module.mix_array, []

    def bent(values: np.ndarray) -> np.ndarray:
        seen.append(values.tolist())
        return np.full_like(values, 2**64 - 1) if len(seen) == 1 else real(values)

    monkeypatch.setattr(order_module, "mix_array", bent)
    draws = order_module._uniform_below(7, 5)
    assert len(seen) == 2 and len(seen[1]) == 4  # below 3, 5, 6 and 7; the powers of two have no ragged top
    assert not set(seen[1]) & set(seen[0])
    assert all(0 <= draw <= i for i, draw in enumerate(draws.tolist()))
