"""How often windows are skipped of late. A few skips are how an fp16 scale finds its level; many are a sick run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from samerun.errors import UsageError

WINDOW: Final = 1000
ALERT_ABOVE: Final = 0.05
EMPTY_IN_A_ROW: Final = 100
"""Not kept over a resume: windows that say nothing by chance do not come in hundreds."""
_FEWEST: Final = 100
"""Below this many windows the rate is taken over this many: a scale that starts too high skips the first few."""


class SkipRate:
    """The share of skipped windows among the last `window`, and one sentence each time it crosses 5 % upwards."""

    def __init__(self, window: int = WINDOW) -> None:
        self._skips: deque[bool] = deque(maxlen=window)
        self._above = False
        self._num_empty = 0

    @property
    def num_windows(self) -> int:
        return len(self._skips)

    @property
    def value(self) -> float:
        """Skipped / seen, both over the last `window` windows; 0 before the first."""
        return sum(self._skips) / len(self._skips) if self._skips else 0.0

    def after(self, *, skipped: bool, weight: float = 1.0) -> str | None:
        """Counts a window. Returns the alert when this window took the rate above 5 %, once per crossing.

        Raises UsageError when so many in a row had no weight that the training would never end.
        """
        self._num_empty = 0 if weight > 0 else self._num_empty + 1
        if self._num_empty >= EMPTY_IN_A_ROW:
            raise UsageError(
                f"{self._num_empty} windows in a row had weight 0 on every rank, so nothing was trained on: is every "
                f"label masked? Give backward() the number of supervised tokens, or train on other data"
            )
        self._skips.append(skipped)
        num_skipped = sum(self._skips) if skipped or self._above else 0
        above = num_skipped > ALERT_ABOVE * max(len(self._skips), _FEWEST)
        crossed = above and not self._above
        self._above = above
        if not crossed:
            return None
        return (
            f"{num_skipped} of the last {len(self._skips)} windows were skipped, more than {ALERT_ABOVE:.0%}: look at "
            f"the reasons in the journal; non_finite_grad at a small scale points at the learning rate or the data, "
            f"non_finite_loss at the batch or the model"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain and short: run lengths, starting with windows that were not skipped."""
        lengths, current = [0], False
        for skipped in self._skips:
            if skipped is not current:
                lengths.append(0)
                current = skipped
            lengths[-1] += 1
        return {"run_lengths": lengths, "above": self._above}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._skips.clear()
        for position, length in enumerate(state["run_lengths"]):
            self._skips.extend([position % 2 == 1] * length)
        self._above = bool(state["above"])
