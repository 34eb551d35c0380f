"""One series under watch: the last W accepted values, its threshold, its drift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from samerun.health.spike.robust import Baseline, Rolling
from samerun.health.spike.threshold import ALPHA, Threshold

WIDTH: Final = 128
MIN_VALUES: Final = 32
"""Fewer accepted values give no baseline, and so no alarm."""
DRIFT_SLACK: Final = 0.5
DRIFT_LIMIT: Final = 10.0
"""Average windows to a false alarm of Gaussian noise: (e^2kb − 2kb − 1)/2k², slack k, b = limit + 1.166 (Siegmund
1985), here 1.4e5."""
_RELATIVE_FLOOR: Final = 1e-3
_MOST: Final = 2.0
"""One wild but accepted value must not be a drift by itself: z enters the sum cut to ±2 (Huber)."""
_MEMORY: Final = 0.01
_MAX_CORRELATION: Final = 0.95


class Series:
    """Values above the baseline are judged, low ones never. A rejected value changes nothing here.

    `logarithmic` series are judged by ln of their values (gradient norms); then the least spread is 0.1 % of the value,
    else 0.1 % of the centre.
    """

    def __init__(self, name: str, *, logarithmic: bool, alpha: float = ALPHA) -> None:
        self.name = name
        self.logarithmic = logarithmic
        self.threshold = Threshold(alpha=alpha)
        self.drift = 0.0
        """One-sided CUSUM: max(0, S + z·√((1−ρ)/(1+ρ)) − 0.5), Page 1954; ρ, the correlation of neighbours, takes back
        what a slowly wandering series adds up by itself."""
        self._last = 0.0
        self._square = 1.0
        self._product = 0.0
        self._values = Rolling(WIDTH)

    @property
    def num_values(self) -> int:
        return len(self._values)

    def baseline(self) -> Baseline | None:
        if len(self._values) < MIN_VALUES:
            return None
        floor = _RELATIVE_FLOOR if self.logarithmic else _RELATIVE_FLOOR * abs(self._values.newest_half)
        return self._values.baseline(floor=floor)

    def accept(self, value: float, z: float | None) -> bool:
        """Takes an ordinary value in. True when the drift has just reached its limit, after which it starts anew."""
        self._values.append(value)
        if z is None:
            return False
        self.threshold.accept(z)
        z = max(-_MOST, min(_MOST, z))
        self._square += _MEMORY * (z * z - self._square)
        self._product += _MEMORY * (z * self._last - self._product)
        self._last = z
        correlation = max(0.0, min(_MAX_CORRELATION, self._product / max(self._square, _MEMORY)))
        self.drift = max(0.0, self.drift + z * ((1 - correlation) / (1 + correlation)) ** 0.5 - DRIFT_SLACK)
        if self.drift < DRIFT_LIMIT:
            return False
        self.drift = 0.0
        return True

    def new_epoch(self) -> None:
        """The level changed on purpose or for good: forget the values, keep the threshold."""
        self._values.clear()
        self.drift = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": list(self._values),
            "drift": [self.drift, self._last, self._square, self._product],
            "threshold": self.threshold.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values.clear()
        for value in state["values"]:
            self._values.append(float(value))
        self.drift, self._last, self._square, self._product = (float(value) for value in state["drift"])
        self.threshold.load_state_dict(state["threshold"])
