"""Which checkpoints stay: small policies, each a pure function of the list (newest first), kept by any = kept.

    Last(5)               the newest five
    Every(1000)           the first one at or after each thousandth update: sparse history for good
    Best(3, score)        the three with the best score; those without a score are none of this policy's business
    Younger(age, limit)   what was saved within `limit` seconds; what does not tell its age is young
    Tagged(names)         what a tag points at

`to_remove` turns what they keep into what may go, and holds what no policy can override (invariants 5 and 6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from samerun.errors import UsageError

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry


class Policy(Protocol):
    def kept(self, entries: Sequence[Entry]) -> set[str]:
        """The names that this policy wants to keep, of `entries` (newest first)."""


@dataclass(frozen=True, slots=True)
class Last:
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"keep the last {self.count}: at least one checkpoint must stay")

    def kept(self, entries: Sequence[Entry]) -> set[str]:
        return {entry.name for entry in entries[: self.count]}


@dataclass(frozen=True, slots=True)
class Every:
    """Of each stretch of `updates` updates, the first checkpoint in it."""

    updates: int

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise UsageError(f"keep one every {self.updates} updates: write a positive number, like 1000")

    def kept(self, entries: Sequence[Entry]) -> set[str]:
        first_of: dict[int, str] = {}
        for entry in sorted(entries, key=lambda entry: (entry.progress.updates.value, entry.age_key)):
            first_of.setdefault(entry.progress.updates.value // self.updates, entry.name)
        return set(first_of.values())


@dataclass(frozen=True, slots=True)
class Best:
    """`score` gives a number or None. Of equal ones, the newer stays."""

    count: int
    score: Callable[[Entry], float | None]
    higher_is_better: bool = False

    def kept(self, entries: Sequence[Entry]) -> set[str]:
        scored = [(value, entry.name) for entry in entries if (value := self.score(entry)) is not None]
        scored = [(value, name) for value, name in scored if value == value]  # NaN is no score
        scored.sort(key=lambda pair: pair[0], reverse=self.higher_is_better)
        return {name for _, name in scored[: self.count]}


@dataclass(frozen=True, slots=True)
class Younger:
    """`age_seconds` gives an age or None."""

    age_seconds: Callable[[Entry], float | None]
    limit_seconds: float

    def kept(self, entries: Sequence[Entry]) -> set[str]:
        ages = ((entry.name, self.age_seconds(entry)) for entry in entries)
        return {name for name, age in ages if age is None or age <= self.limit_seconds}


@dataclass(frozen=True, slots=True)
class Tagged:
    names: frozenset[str]

    def kept(self, entries: Sequence[Entry]) -> set[str]:
        return {entry.name for entry in entries if entry.name in self.names}


def kept_by_any(policies: Iterable[Policy], entries: Sequence[Entry]) -> set[str]:
    kept: set[str] = set()
    for policy in policies:
        kept |= policy.kept(entries)
    return kept


def to_remove(entries: Sequence[Entry], kept: Collection[str], *, epoch: int, proven: Collection[str]) -> list[str]:
    """What may go, oldest first: not kept, of this or an older attempt, and never the newest proven one.

    `proven` are those whose bytes are known to be right: published, loaded or verified by this process. When none of
    them would stay, the newest of them stays too; when there is none at all, nothing goes.
    """
    known = [entry.name for entry in entries if entry.name in proven]
    if not known:
        return []
    stay = {*kept, known[0]}
    return [entry.name for entry in reversed(entries) if entry.name not in stay and entry.epoch <= epoch]
