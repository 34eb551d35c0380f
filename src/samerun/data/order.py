"""Which sample stands at which position: a pure function of (seed, epoch, offset), the same for every rank and worker.

Up to 65,536 samples: Fisher–Yates with draws from a counter generator, so every order is equally likely up to the
quality of the 64-bit mixer. Above: a Feistel network on Z_a × Z_b with cycle walking (Black and Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002), which needs no memory and no pass over the skipped samples: any position is
looked up alone. Keys are BLAKE2b of (tag, seed, epoch, length, round); nothing else enters, in particular not the
batch, the rank count, or how long training will last.

A change of this function is a new ORDER_VERSION; the old one stays readable.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from samerun.data.coverage import GOLDEN, MASK, U64, mix_array

ORDER_VERSION: Final = "permutation.v1"
EXACT_SHUFFLE_MAX: Final = 65_536
MAX_SAMPLES: Final = 2**60
"""Positions are int64; this leaves room for the cycle walk and for eight epochs of the largest dataset."""

_ROUNDS: Final = 8
_CACHED_EPOCHS: Final = 8
_BLOCK: Final = 2**14
"""Elements worked on at once: the temporaries of one block stay in the second-level cache."""

Int64Array = NDArray[np.int64]


class Order:
    """The order of `num_samples` samples in every epoch, for one seed. Stateless but for a cache."""

    __slots__ = ("_shuffles", "num_samples", "seed")

    def __init__(self, *, num_samples: int, seed: int) -> None:
        assert 0 < num_samples <= MAX_SAMPLES, num_samples
        self.num_samples = num_samples
        self.seed = seed
        self._shuffles: OrderedDict[int, Int64Array] = OrderedDict()

    def lookup(self, epochs: Int64Array, offsets: Int64Array) -> Int64Array:
        """Sample ids at `offsets` (0 ≤ offset < num_samples) of `epochs`; both of one length."""
        if epochs.size == 0:
            return np.empty(0, np.int64)
        if epochs[0] == epochs[-1] and (epochs == epochs[0]).all():
            return self._one_epoch(int(epochs[0]), offsets)
        result = np.empty(len(offsets), np.int64)
        values, inverse = np.unique(epochs, return_inverse=True)
        by_epoch = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[by_epoch], np.arange(len(values) + 1))
        for epoch, first, last in zip(values.tolist(), bounds[:-1], bounds[1:], strict=True):
            where = by_epoch[first:last]
            result[where] = self._one_epoch(epoch, offsets[where])
        return result

    def _one_epoch(self, epoch: int, offsets: Int64Array) -> Int64Array:
        if self.num_samples <= EXACT_SHUFFLE_MAX:
            return self._shuffle(epoch)[offsets]
        keys = tuple(_key("feistel", self.seed, epoch, self.num_samples, r) for r in range(_ROUNDS))
        return _walk(offsets.astype(np.uint64), self.num_samples, keys).astype(np.int64)

    def _shuffle(self, epoch: int) -> Int64Array:
        known = self._shuffles.get(epoch)
        if known is None:
            known = _fisher_yates(self.num_samples, _key("shuffle", self.seed, epoch, self.num_samples, 0))
            self._shuffles[epoch] = known
            if len(self._shuffles) > _CACHED_EPOCHS:
                self._shuffles.popitem(last=False)
        return known


def _key(tag: str, seed: int, epoch: int, num_samples: int, number: int) -> int:
    text = f"samerun.{ORDER_VERSION}|{tag}|{seed}|{epoch}|{num_samples}|{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _fisher_yates(num_samples: int, key: int) -> Int64Array:
    """Durstenfeld's form: for i from the top down, swap i with a uniform j ≤ i."""
    order = list(range(num_samples))
    draws = _uniform_below(num_samples, key).tolist()
    for i in range(num_samples - 1, 0, -1):
        j = draws[i]
        order[i], order[j] = order[j], order[i]
    return np.array(order, np.int64)


def _uniform_below(num_samples: int, key: int) -> Int64Array:
    """Element i: an exactly uniform draw from 0 … i. Draws in the ragged top of 2^64 are rejected and drawn again."""
    numbers = np.arange(num_samples, dtype=np.uint64)
    moduli = numbers + np.uint64(1)
    ragged = (~moduli + np.uint64(1)) % moduli  # 2^64 mod modulus, without leaving 64 bits
    limits = np.uint64(MASK) - ragged
    draws = mix_array(np.uint64(key) + numbers * np.uint64(GOLDEN))
    attempt = 0
    while (rejected := draws > limits).any():
        attempt += 1
        counters = numbers[rejected] + np.uint64(attempt * num_samples)
        draws[rejected] = mix_array(np.uint64(key) + counters * np.uint64(GOLDEN))
    return (draws % moduli).astype(np.int64)


def _walk(offsets: U64, num_samples: int, keys: tuple[int, ...]) -> U64:
    """Cycle walking: apply the permutation of the larger domain a·b until the value is inside 0 … num_samples − 1."""
    high = math.isqrt(num_samples - 1) + 1
    low = -(-num_samples // high)
    result = np.empty_like(offsets)
    for first in range(0, len(offsets), _BLOCK):
        block = _feistel(offsets[first : first + _BLOCK], high, low, keys)
        while (outside := block >= num_samples).any():
            block[outside] = _feistel(block[outside], high, low, keys)
        result[first : first + _BLOCK] = block
    return result


def _feistel(values: U64, high: int, low: int, keys: tuple[int, ...]) -> U64:
    """A bijection of 0 … high·low − 1: two halves in Z_high and Z_low, alternating additions of a keyed mix."""
    left = values // np.uint64(low)
    right = values - left * np.uint64(low)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            _add_modulo(left, mix_array(right + np.uint64(key)), np.uint64(high))
        else:
            _add_modulo(right, mix_array(left + np.uint64(key)), np.uint64(low))
    left *= np.uint64(low)
    left += right
    return left


def _add_modulo(half: U64, mixed: U64, modulus: np.uint64) -> None:
    """half ← (half + mixed) mod modulus. `mixed` is reduced first: a sum that wrapped at 2^64 could not be undone.

    Written with quotients, which NumPy vectorises for a scalar divisor; its remainder is four times slower.
    """
    mixed -= (mixed // modulus) * modulus
    half += mixed
    half -= (half >= modulus) * modulus
