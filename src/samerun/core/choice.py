"""Options with a few named values, and options that are numbers: what a person may write, and what an error says when
they write something else."""

from __future__ import annotations

import math
import numbers
import operator
from enum import Enum
from typing import Any, Self

from samerun.errors import UsageError


class Choice(Enum):
    """Base of the enums that options are given as. The values are the words of the public interface."""

    @classmethod
    def parse(cls, value: str | Self, *, option: str) -> Self:
        """The member itself or the one of this name. Raises UsageError naming the `option` and all choices."""
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in cls)
            raise UsageError(f"{option}={value!r} is unknown; choose one of {known}") from None


def whole_number(value: Any, *, option: str, at_least: int, instead: str = "") -> int:
    """`value` as an int: NumPy's integers are, True and 2.0 are not. `instead`: what else may be written.

    Raises UsageError naming the `option`.
    """
    is_array = bool(getattr(value, "shape", None))
    if isinstance(value, bool) or is_array or not hasattr(type(value), "__index__"):
        raise UsageError(f"{option}={value!r} is not a whole number{instead and f'; {instead}'}")
    number = operator.index(value)
    if number < at_least:
        raise UsageError(f"{option}={value!r} must be at least {at_least}{instead and f'; {instead}'}")
    return number


def positive_number(value: Any, *, option: str, instead: str = "") -> float:
    """`value` as a float: finite and above 0, of Python or NumPy. `instead`: what else may be written.

    Raises UsageError naming the `option`.
    """
    number = float(value) if isinstance(value, numbers.Real) and value is not True else math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"{option}={value!r} must be a positive finite number{instead and f'; {instead}'}")
    return number
