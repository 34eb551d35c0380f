"""Amounts that carry their unit: sizes (GiB and GB are never mixed), durations, and amounts of training.

Parsing is strict: a bare number is refused wherever two units would be plausible, and the message shows the nearest
right way to write it.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from samerun.errors import UsageError

_NUMBER: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ]*)\s*\Z")

_DURATION_SECONDS: Final[dict[str, float]] = {
    "ms": 1e-3,
    "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "min": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip

_SIZE_BYTES: Final[dict[str, int]] = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER.match(text)
    if found is None:
        raise UsageError(f"{what} {text!r} is not a number with a unit; write it like {example!r}")
    number = float(found.group(1))
    if not math.isfinite(number):
        raise UsageError(f"{what} {text!r} is not finite; write it like {example!r}")
    return number, found.group(2)


def parse_seconds(text: str | float) -> float:
    """`"10 min"`, `"90s"`, `"4h"`, `"250 ms"` in seconds; a bare number is refused unless it is already a float.

    Raises UsageError for an unknown unit, a negative or non-finite value.
    """
    if not isinstance(text, str):
        number, unit = float(text), "s"
        if not math.isfinite(number):
            raise UsageError(f"duration {text!r} is not finite; write it like '90s'")
    else:
        number, unit = _split(text, "duration", "10 min")
    if unit not in _DURATION_SECONDS:
        said = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise UsageError(f"duration {text!r} {said}; write it like '{number:g} s', '{number:g} min' or '{number:g} h'")
    if number < 0:
        raise UsageError(f"duration {text!r} is negative; write it like '10 min'")
    return number * _DURATION_SECONDS[unit]


def format_seconds(seconds: float) -> str:
    """Two significant units at most: `0.25 s`, `3 min 45 s`, `7.8 h`, `12.4 d`."""
    if not math.isfinite(seconds):
        return "never" if seconds > 0 else str(seconds)
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86400:.4g} d"


class SizeBase(Enum):
    """Whether a size was said in powers of ten (GB) or of two (GiB). Sums keep one base."""

    DECIMAL = 1000
    BINARY = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes and the base it is spoken in. Adding GiB to GB raises TypeError: convert first."""

    num_bytes: int
    base: SizeBase = SizeBase.BINARY

    def _same(self, other: Size) -> int:
        if other.base is not self.base:
            raise TypeError(f"{self} and {other} are in different bases; convert one with .to(SizeBase.…) first")
        return other.num_bytes

    def __add__(self, other: Size) -> Size:
        return Size(self.num_bytes + self._same(other), self.base)

    def __sub__(self, other: Size) -> Size:
        return Size(self.num_bytes - self._same(other), self.base)

    def __lt__(self, other: Size) -> bool:
        return self.num_bytes < self._same(other)

    def __le__(self, other: Size) -> bool:
        return self.num_bytes <= self._same(other)

    def to(self, base: SizeBase) -> Size:
        return Size(self.num_bytes, base)

    def __str__(self) -> str:
        return format_bytes(self.num_bytes, self.base)


def parse_size(text: str) -> Size:
    """`"24GiB"` or `"24 GB"` as a Size. A bare number is refused: GiB and GB differ by 7 %."""
    number, unit = _split(text, "size", "24GiB")
    if unit not in _SIZE_BYTES:
        said = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise UsageError(f"size {text!r} {said}; write '{number:g}GiB' (2^30 bytes) or '{number:g}GB' (10^9 bytes)")
    if number < 0:
        raise UsageError(f"size {text!r} is negative; write it like '24GiB'")
    base = SizeBase.BINARY if "i" in unit else SizeBase.DECIMAL
    return Size(round(number * _SIZE_BYTES[unit]), base)


def format_bytes(num_bytes: float, base: SizeBase = SizeBase.BINARY) -> str:
    """`32.6 GiB` or `35 GB`: three significant digits, the unit always said."""
    names = ("B", "KiB", "MiB", "GiB", "TiB") if base is SizeBase.BINARY else ("B", "kB", "MB", "GB", "TB")
    value, power = float(num_bytes), 0
    while abs(value) >= base.value and power < len(names) - 1:
        value, power = value / base.value, power + 1
    return f"{value:.4g} {names[power]}" if abs(value) >= 1000 else f"{value:.3g} {names[power]}"


class AmountUnit(Enum):
    SECONDS = "seconds"
    UPDATES = "updates"
    WINDOWS = "windows"
    SAMPLES = "samples"
    TOKENS = "tokens"
    EPOCHS = "epochs"


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of training: `"10 min"`, `"500 updates"`, `"2e9 tokens"`, `"3 epochs"`."""

    value: float
    unit: AmountUnit

    def __str__(self) -> str:
        if self.unit is AmountUnit.SECONDS:
            return format_seconds(self.value)
        return f"{self.value:g} {self.unit.value}"


def parse_amount(text: str | int, *, bare: AmountUnit | None = None) -> Amount:
    """An amount of training. A bare number takes the unit `bare`, or is refused when none is given."""
    if not isinstance(text, str):
        if isinstance(text, bool) or not hasattr(type(text), "__index__"):
            raise UsageError(f"amount {text!r} is neither a whole number nor a text; write it like '500 updates'")
        text = str(operator.index(text))
    number, unit = _split(text, "amount", "500 updates")
    if unit in _DURATION_SECONDS:
        return Amount(parse_seconds(text), AmountUnit.SECONDS)
    if not unit and bare is not None:
        found = bare
    else:
        singular = unit if unit.endswith("s") else f"{unit}s"
        known = {member.value: member for member in AmountUnit if member is not AmountUnit.SECONDS}
        if singular not in known:
            said = f"has the unknown unit {unit!r}" if unit else "has no unit"
            raise UsageError(
                f"amount {text!r} {said}; write it like '10 min', '{number:g} updates', '{number:g} samples', "
                f"'{number:g} tokens' or '{number:g} epochs'"
            )
        found = known[singular]
    if number <= 0 or (found is not AmountUnit.EPOCHS and number != int(number)):
        raise UsageError(f"amount {text!r} must be a positive whole number; write it like '500 updates'")
    return Amount(number, found)
