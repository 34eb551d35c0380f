"""Whether a canary may judge, by its own repetitions; and how much it could have seen. Pure arithmetic.

    all repetitions bitwise equal   tolerance 0
    otherwise                       4 × the largest relative deviation, refused above λ·√n·u plus one output ulp

n is the reduction length, λ = 6, u the rounding unit of the accumulator (2^-24 fp32, 2^-11 fp16, 2^-8 bf16): beyond
that rounding cannot be the reason, so the device may not set its own tolerance. Power: a device that corrupts a share f
of runs escapes m runs with (1 − f)^m, so 95 % detection takes ln 0.05 / ln(1 − f) runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from samerun.errors import UsageError

REPETITIONS: Final = 20
_MARGIN: Final = 4.0
_LAMBDA: Final = 6.0
ROUNDING_UNIT: Final = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Qualification:
    tolerance: float | None
    """Largest relative deviation that still passes; None: the canary is not qualified and never says "pass"."""
    reason: str

    @property
    def is_qualified(self) -> bool:
        return self.tolerance is not None


def qualify(deviations: Sequence[float], *, reduction: int, accumulator: str, output: str) -> Qualification:
    """`deviations`: largest relative difference of each repetition from the first. Raises UsageError for too few."""
    if len(deviations) < REPETITIONS - 1:
        raise UsageError(f"a canary is qualified by {REPETITIONS} repetitions, got {len(deviations) + 1}")
    largest = max(deviations)
    if largest == 0:
        return Qualification(tolerance=0.0, reason=f"{len(deviations) + 1} repetitions were bitwise equal")
    bound = _LAMBDA * math.sqrt(reduction) * ROUNDING_UNIT[accumulator] + 2 * ROUNDING_UNIT[output]
    tolerance = _MARGIN * largest
    if not tolerance <= bound:  # also when it is NaN
        return Qualification(
            tolerance=None,
            reason=f"repetitions differ by {largest:.2g}; four times that exceeds {bound:.2g}, the most that rounding "
            f"over {reduction} terms in {accumulator} explains",
        )
    return Qualification(tolerance=tolerance, reason=f"repetitions differ by at most {largest:.2g}")


def runs_for_detection(share: float, *, confidence: float = _CONFIDENCE) -> int:
    """Runs after which a device that corrupts `share` of them has been seen with `confidence`."""
    if not 0 < share < 1:
        raise UsageError(f"a share of corrupted runs lies between 0 and 1, got {share:g}")
    return math.ceil(math.log(1 - confidence) / math.log1p(-share))


def share_seen(num_runs: int, *, confidence: float = _CONFIDENCE) -> float:
    """The least share of corrupted runs that `num_runs` clean ones exclude with `confidence`."""
    return 1 - (1 - confidence) ** (1 / num_runs) if num_runs > 0 else 1.0


def false_alarm_budget(num_ranks: int, runs_per_day: float, *, days_between: float = 30.0) -> float:
    """The probability that one run may have of a false alarm, for one in `days_between` days over all ranks."""
    return 1 / (days_between * num_ranks * runs_per_day)
