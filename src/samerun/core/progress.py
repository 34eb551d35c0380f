"""Five counters that are never mixed: windows, skipped, updates, samples, tokens.

Each counter is its own type. Adding updates to tokens fails to type-check and raises at run time; plain integers
may be added, compared and divided, so `run.progress.updates % 100 == 0` reads as it should.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Self


@functools.total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Count:
    """A non-negative integer with a meaning. Arithmetic with another kind of count raises TypeError."""

    value: int = 0

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError(f"a count of {self._unit()} cannot be negative, got {self.value}")

    @classmethod
    def _unit(cls) -> str:
        return cls.__name__.lower()

    def _same(self, other: object) -> int:
        if isinstance(other, Count) and type(other) is not type(self):
            raise TypeError(f"{self._unit()} and {other._unit()} are different counters and cannot be mixed")
        if isinstance(other, Count):
            return other.value
        if isinstance(other, int) and not isinstance(other, bool):
            return other
        raise TypeError(f"expected {self._unit()} or an int, got {type(other).__name__}")

    def __add__(self, other: Self | int) -> Self:
        return type(self)(self.value + self._same(other))

    def __sub__(self, other: Self | int) -> Self:
        return type(self)(self.value - self._same(other))

    def __mod__(self, other: Self | int) -> int:
        return self.value % self._same(other)

    def __floordiv__(self, other: Self | int) -> int:
        return self.value // self._same(other)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Count, int)):
            return self.value == self._same(other)
        return NotImplemented

    def __lt__(self, other: Self | int) -> bool:
        return self.value < self._same(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __bool__(self) -> bool:
        return self.value != 0

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


class Windows(Count):
    """Attempted updates, decided one way or the other."""

    __slots__ = ()


class Skipped(Count):
    """Windows that were attempted and changed no parameter."""

    __slots__ = ()


class Updates(Count):
    """Successful optimizer steps."""

    __slots__ = ()


class Samples(Count):
    """Samples of decided windows, over all replicas."""

    __slots__ = ()


class Tokens(Count):
    """Sum of the weights given to `backward`, over all replicas."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come, as of its last edge."""

    windows: Windows = field(default_factory=Windows)
    skipped: Skipped = field(default_factory=Skipped)
    updates: Updates = field(default_factory=Updates)
    samples: Samples = field(default_factory=Samples)
    tokens: Tokens = field(default_factory=Tokens)

    def after(self, *, updated: bool, samples: int, tokens: int) -> Progress:
        """The progress once one more window is decided."""
        return Progress(
            windows=self.windows + 1,
            skipped=self.skipped + (0 if updated else 1),
            updates=self.updates + (1 if updated else 0),
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
        )

    def to_json(self) -> dict[str, int]:
        return {name: getattr(self, name).value for name in _KINDS}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        if set(value) != set(_KINDS):
            raise ValueError(f"progress has the counters {sorted(_KINDS)}, found {sorted(value)}")
        return cls(
            windows=Windows(int(value["windows"])),
            skipped=Skipped(int(value["skipped"])),
            updates=Updates(int(value["updates"])),
            samples=Samples(int(value["samples"])),
            tokens=Tokens(int(value["tokens"])),
        )


_KINDS = ("windows", "skipped", "updates", "samples", "tokens")
