"""How many spreads are too many, for this run: calibrated from its own accepted windows to a stated false-alarm rate.

The tail above the 95 % quantile u of the z values is taken for exponential with mean excess b, which gives
k = u + b·ln(0.05 / α) for α false alarms a window (peaks over threshold, Pickands 1975). A tail heavier than that shows
as a positive shape ξ of the generalised Pareto fit by probability-weighted moments (Hosking and Wallis 1987); then
k = u + σ/ξ·((0.05/α)^ξ − 1), whichever is larger. k stays within [5, 20]; below MIN_SAMPLES windows it is 20. With many
windows the tail begins further out, at the highest 250 of them (at least 0.1 %), where the fit has less to guess.

The z values are kept as a histogram (bins of 1/8), so the state is a few hundred bytes and grows no further.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

ALPHA: Final = 1e-5
"""False alarms a window and series that the threshold is calibrated to."""
MIN_SAMPLES: Final = 512
K_MIN: Final = 5.0
K_MAX: Final = 20.0
_TAIL: Final = 0.05
_TAIL_SAMPLES: Final = 250
_MIN_TAIL: Final = 1e-3
_BIN: Final = 0.125
_NUM_BINS: Final = round(K_MAX / _BIN) + 1
_MAX_SHAPE: Final = 0.5
"""Above it the fit has no variance; K_MAX bounds what it could say anyway."""


class Threshold:
    """k for one series. Grows wiser with every ordinary window, and with lone ones above it that were back at once."""

    def __init__(self, *, alpha: float = ALPHA) -> None:
        self.alpha = alpha
        self._counts = [0] * _NUM_BINS
        self._num = 0
        self._k = K_MAX
        self._next_fit = MIN_SAMPLES

    @property
    def k(self) -> float:
        return self._k

    @property
    def num_samples(self) -> int:
        return self._num

    @property
    def is_calibrated(self) -> bool:
        return self._num >= MIN_SAMPLES

    def accept(self, z: float) -> None:
        self._counts[min(_NUM_BINS - 1, max(0, math.ceil(z / _BIN)))] += 1
        self._num += 1
        if self._num >= self._next_fit:
            self._next_fit = self._num + max(64, self._num // 16)  # cost per window stays constant
            self._k = fitted(self._counts, self._num, self.alpha)

    def state_dict(self) -> dict[str, Any]:
        last = max((i for i, count in enumerate(self._counts) if count), default=-1)
        return {"counts": self._counts[: last + 1], "k": self._k, "next_fit": self._next_fit, "alpha": self.alpha}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = [int(count) for count in state["counts"]][:_NUM_BINS]
        self._counts = counts + [0] * (_NUM_BINS - len(counts))
        self._num = sum(self._counts)
        self._k, self._next_fit = float(state["k"]), int(state["next_fit"])
        self.alpha = float(state["alpha"])


def fitted(counts: list[int], num: int, alpha: float) -> float:
    """k from a histogram: bin i holds z in ((i − 1)/8, i/8], the last one everything above."""
    above, first = 0, _NUM_BINS
    enough = min(_TAIL, max(_MIN_TAIL, _TAIL_SAMPLES / num)) * num
    while first > 1 and above < enough:
        first -= 1
        above += counts[first]
    u = (first - 1) * _BIN
    tail = above / num
    if above == 0 or tail <= alpha:
        return K_MIN
    excesses = [((i - first + 0.5) * _BIN, counts[i]) for i in range(first, _NUM_BINS) if counts[i]]
    mean = sum(x * n for x, n in excesses) / above
    k = u + mean * math.log(tail / alpha)
    shape, scale = _pareto(excesses, above, mean)
    if shape > 0:
        k = max(k, u + scale / shape * ((tail / alpha) ** shape - 1))
    return max(K_MIN, min(K_MAX, k))


def _pareto(excesses: list[tuple[float, int]], total: int, mean: float) -> tuple[float, float]:
    """(shape ξ, scale σ) by probability-weighted moments: a1 = E[x·(1 − F(x))]."""
    below, weighted = 0, 0.0
    for x, n in excesses:
        rank = below + (n - 1) / 2
        weighted += x * n * (1 - (rank + 0.65) / total)  # plotting position (i − 0.35)/n, i from 1
        below += n
    weighted /= total
    denominator = mean - 2 * weighted
    if denominator <= 0:
        return _MAX_SHAPE, mean * (1 - _MAX_SHAPE)
    shape = min(_MAX_SHAPE, 2 - mean / denominator)
    return shape, 2 * mean * weighted / denominator
