"""Proof of exactly-once: an order-independent sum over the samples that really arrived.

coverage = Σ mix64(epoch, sample) mod 2^64. Sums of disjoint parts add up, so every replica adds its own and one integer
all-reduce proves a whole window; a sample that is missing, repeated or swapped for another changes the sum (a change
that keeps it has probability 2^-64). It proves which samples were read, not what the file behind them said.

mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014,
constants of Stafford's variant 13), applied twice so that (epoch, sample) and (epoch + 1, sample − 1) differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

MASK: Final = 2**64 - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
_FEW: Final = 16
_M1: Final = 0xBF58476D1CE4E5B9
_M2: Final = 0x94D049BB133111EB


def mix(value: int) -> int:
    """SplitMix64's finaliser on one integer: a bijection of 0 … 2^64 − 1."""
    z = value & MASK
    z = ((z ^ (z >> 30)) * _M1) & MASK
    z = ((z ^ (z >> 27)) * _M2) & MASK
    return z ^ (z >> 31)


def mix_array(values: U64) -> U64:
    """`mix` of each element, in a new array. Integer arithmetic only: the same on every platform."""
    z = values ^ (values >> np.uint64(30))
    z *= np.uint64(_M1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_M2)
    z ^= z >> np.uint64(31)
    return z


def mix64(epoch: int, sample: int) -> int:
    """The 64-bit fingerprint of one sample of one epoch."""
    return mix(mix(epoch + GOLDEN) + sample)


def fingerprints(epochs: NDArray[np.int64], samples: NDArray[np.int64]) -> U64:
    """`mix64` of each pair of two arrays of equal length."""
    starts = mix_array(epochs.astype(np.uint64) + np.uint64(GOLDEN))
    return mix_array(starts + samples.astype(np.uint64))


def coverage_of(epochs: NDArray[np.int64], samples: NDArray[np.int64]) -> int:
    """Σ mix64(epoch, sample) mod 2^64 over two arrays of equal length; 0 when they are empty."""
    return int(fingerprints(epochs, samples).sum(dtype=np.uint64))


def coverage_of_pairs(pairs: Sequence[tuple[int, int]]) -> int:
    """The same of (epoch, sample) pairs; faster than arrays for a microbatch of a few."""
    if len(pairs) <= _FEW:
        return sum(mix64(epoch, sample) for epoch, sample in pairs) & MASK
    both = np.array(pairs, np.int64)
    return coverage_of(both[:, 0], both[:, 1])


def add_coverage(first: int, second: int) -> int:
    """The coverage of two disjoint parts together."""
    return (first + second) & MASK
