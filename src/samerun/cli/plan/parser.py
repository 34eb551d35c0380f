"""Options of `samerun plan`, read by argparse: a command answers in a quarter of a second.

Importing typer and building one pydantic adapter per option takes longer than the arithmetic, so these commands are
parsed by the standard library. Errors are UsageError with the command's own example.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, NoReturn, TypeVar

from samerun.core.units import Size, parse_seconds, parse_size
from samerun.errors import UsageError

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)
_COUNTS: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError and shows examples under its help."""

    def __init__(self, *, name: str, summary: str, examples: Sequence[str], notes: str = "") -> None:
        shown = "\n".join(["examples:", *(f"  samerun plan {name} {example}" for example in examples)])
        super().__init__(
            prog=f"samerun plan {name}",
            description=summary,
            epilog=f"{notes}\n\n{shown}" if notes else shown,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self._example = f"samerun plan {name} {examples[0]}"
        self.add_argument("--json", action="store_true", help="one JSON document on standard output")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError: what is wrong, and an invocation that works."""
        raise UsageError(f"{self.prog}: {message}; for example: {self._example}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def kind(function: Callable[[str], _T]) -> Callable[[str], _T]:
    """A `type=` for argparse that keeps the message of a UsageError."""

    def convert(text: str) -> _T:
        try:
            return function(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _count(text: str) -> int:
    factor = _COUNTS.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if factor != 1.0 else text) * factor
        whole = round(value)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{text!r} is not a number; write it like 70e9 or 70B") from error
    if whole <= 0 or abs(whole - value) > 1e-6 * value:
        raise UsageError(f"{text!r} is not a positive whole number; write it like 70e9")
    return whole


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) == 0:
        raise UsageError(f"{text!r} is not a positive whole number; write it like 8")
    return int(text)


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number; write it like 0.001") from error


def _rate(text: str) -> tuple[int, float]:
    """`3 in 100h` or `3/100h`: events and the seconds they were counted in."""
    found = re.fullmatch(r"\s*(\d+)\s*(?:in|/)\s*(.+)", text)
    if found is None:
        raise UsageError(f"{text!r} is not a count in a time; write it like '3 in 100h'")
    return int(found.group(1)), parse_seconds(found.group(2))


COUNT: Final = kind(_count)
"""`70e9`, `70B` (10^9), `125M`."""
WHOLE: Final = kind(_whole)
REAL: Final = kind(_real)
SIZE: Final[Callable[[str], Size]] = kind(parse_size)
SECONDS: Final[Callable[[str], float]] = kind(parse_seconds)
FAILURES: Final = kind(_rate)


def member(of: type[_E]) -> Callable[[str], _E]:
    """A `type=` that gives the member of that value and lists the values otherwise."""

    def convert(text: str) -> _E:
        for candidate in of:
            if candidate.value == text:
                return candidate
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; one of: {values(of)}")

    return convert


def values(of: type[Enum]) -> str:
    """The values of an enum for a line of help."""
    return ", ".join(str(candidate.value) for candidate in of)


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the named options that were given a value."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
