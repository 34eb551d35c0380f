"""Checks of what a user asked for: every refusal names the field, what was given, and the nearest right example."""

from __future__ import annotations

import math

from samerun.errors import UsageError


def positive(name: str, value: float, example: str) -> float:
    """`value` when it is finite and above zero; UsageError otherwise."""
    if not math.isfinite(value) or value <= 0:
        raise UsageError(f"{name} must be positive and finite, got {value:g}; write it like {example}")
    return value


def not_negative(name: str, value: float, example: str) -> float:
    """`value` when it is finite and at least zero; UsageError otherwise."""
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} must be zero or more and finite, got {value:g}; write it like {example}")
    return value


def whole(name: str, value: float, example: str) -> int:
    """A positive whole number, also when it was written as 70e9; UsageError otherwise."""
    positive(name, value, example)
    if value != int(value):
        raise UsageError(f"{name} must be a whole number, got {value:g}; write it like {example}")
    return int(value)


def fraction(name: str, value: float, example: str) -> float:
    """`value` when it lies in 0..1; UsageError otherwise."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name} must lie between 0 and 1, got {value:g}; write it like {example}")
    return value


def divides(small_name: str, small: int, big_name: str, big: int) -> None:
    """Raises UsageError unless `small` divides `big`; names the divisors that would do."""
    if big % small:
        good = [d for d in range(1, min(big, 4096) + 1) if big % d == 0]
        near = sorted(sorted(good, key=lambda d: abs(d - small))[:3])
        raise UsageError(
            f"{small_name} {small} does not divide {big_name} {big}; "
            f"the nearest that do: {', '.join(str(d) for d in near)}"
        )
