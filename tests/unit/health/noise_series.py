"""Ordinary losses and gradient norms with four kinds of noise, and the published BLOOM-176B spike."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Final

KINDS: Final = ("gaussian", "wandering", "student t5", "laplace")


def standard(kind: str, generator: random.Random) -> Iterator[float]:
    """Endless noise of unit scale. Wandering is AR(1) with coefficient 0.7."""
    level = 0.0
    while True:
        if kind == "gaussian":
            yield generator.gauss(0, 1)
        elif kind == "wandering":
            level = 0.7 * level + math.sqrt(1 - 0.49) * generator.gauss(0, 1)
            yield level
        elif kind == "student t5":
            yield generator.gauss(0, 1) / math.sqrt(generator.gammavariate(2.5, 2) / 5)
        else:
            yield generator.expovariate(1) * (1 if generator.random() < 0.5 else -1)


def ordinary(kind: str, num_windows: int, *, seed: int = 1) -> Iterator[tuple[float, float]]:
    """(loss, gradient norm) around 2.5 ± 0.03 and 0.37 · exp(± 0.1), with independent noise."""
    first, second = standard(kind, random.Random(seed)), standard(kind, random.Random(seed + 1000))
    for _ in range(num_windows):
        yield 2.5 + 0.03 * next(first), math.exp(-1 + 0.1 * next(second))


BLOOM_FIRST_WINDOW: Final = 31214
BLOOM_LOSS: Final = (2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.492, 3.213, 2.805)
BLOOM_GRAD_NORM: Final = (0.242, 0.947, 2.39, 15.9, 145.0, 960.0, 353.0, 379.0, 650.0)
BLOOM_AFTERWARDS: Final = (31250, 2.216, 0.267)
"""BigScience's chronicle of BLOOM-176B: windows 31214 to 31222, and where it stood at 31250."""


def bloom(*, before: int = 700, seed: int = 3) -> Iterator[tuple[int, float, float]]:
    """(window, loss, gradient norm): ordinary, the published ones, a geometric way back to 31250, ordinary again.

    Only the nine windows and 31250 are published; the noise before (sd 0.03 and 10 %) and the way back are ours.
    """
    generator = random.Random(seed)
    for window in range(BLOOM_FIRST_WINDOW - before, BLOOM_FIRST_WINDOW):
        yield window, 2.2 + 0.03 * generator.gauss(0, 1), 0.25 * math.exp(0.1 * generator.gauss(0, 1))
    yield from zip(range(BLOOM_FIRST_WINDOW, BLOOM_FIRST_WINDOW + 9), BLOOM_LOSS, BLOOM_GRAD_NORM, strict=True)
    last, (end, loss, norm) = BLOOM_FIRST_WINDOW + 8, BLOOM_AFTERWARDS
    for window in range(last + 1, end + 1):
        share = min(1.0, 2 * (window - last) / (end - last))  # back after half of the way
        yield window, BLOOM_LOSS[-1] ** (1 - share) * loss**share, BLOOM_GRAD_NORM[-1] ** (1 - share) * norm**share
    for window in range(end + 1, end + 200):
        yield window, 2.2 + 0.03 * generator.gauss(0, 1), 0.25 * math.exp(0.1 * generator.gauss(0, 1))
