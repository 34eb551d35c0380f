"""The simple rules that people know, by name, for comparison. Neither is the default: their multiples are fixed.

`measure` counts their false alarms on a series of ordinary losses. Measured figures stand in docs/health.md; they
depend on the noise, which is why the detector calibrates itself instead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from samerun.errors import UsageError
from samerun.health.spike.robust import median

Rule = Callable[[float], bool]
"""Called with each loss in order; True is an alarm."""

_WIDTH: Final = 50


def ratio_above_2() -> Rule:
    """`ratio > 2`: the loss is more than twice that of the window before."""
    last = math.nan

    def alarm(loss: float) -> bool:
        nonlocal last
        out, last = loss > 2 * last, loss
        return out

    return alarm


def three_sigma_over_50() -> Rule:
    """`median + 3σ over 50`: above the median of the last 50 losses by three of their standard deviations.

    The window takes every loss in, spikes too, as the rule is usually written.
    """
    recent: deque[float] = deque(maxlen=_WIDTH)

    def alarm(loss: float) -> bool:
        out = False
        if len(recent) == _WIDTH:
            mean = sum(recent) / _WIDTH
            sigma = math.sqrt(sum((x - mean) ** 2 for x in recent) / _WIDTH)
            out = loss > median(list(recent)) + 3 * sigma
        recent.append(loss)
        return out

    return alarm


RULES: Final[dict[str, Callable[[], Rule]]] = {
    "ratio > 2": ratio_above_2,
    "median + 3σ over 50": three_sigma_over_50,
}


def rule(name: str) -> Rule:
    """A fresh rule by name. Raises UsageError for a name that is none."""
    if name not in RULES:
        raise UsageError(f"spike rule {name!r} is none of {', '.join(repr(known) for known in RULES)}")
    return RULES[name]()


def measure(rule: Rule, losses: Iterable[float]) -> float:
    """Alarms a window on a series that holds no spike."""
    alarms, total = 0, 0
    for loss in losses:
        alarms += rule(loss)
        total += 1
    return alarms / total
