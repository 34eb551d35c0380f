"""When to start again and when to stop: one ledger for the run, reset only by committed progress. Pure.

    a stop that was asked for, a refusal, a word not to restart     handed on as it is
    a failure after new committed progress                          start again, the count begins anew
    the same failure without progress, `same` times                 93, with the evidence
    any failure without progress, `any` times                       93, with the evidence

A failure is the same when its sentence is, numbers aside: a rank or an address that changes does not make it new.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from samerun.errors import UsageError

_NUMBERS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FIRST_WAIT_SECONDS: Final = 1.0
_LONGEST_WAIT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One start that failed: the ledger's line."""

    reason: str
    rank: int | None
    window: int | None
    batch: str | None
    """Which samples that window held."""
    committed_updates: int
    """What the run's newest checkpoint held when this start had ended."""
    checkpoint: str | None
    """What this start had resumed from."""

    @property
    def signature(self) -> str:
        return _NUMBERS.sub("#", self.reason.splitlines()[0] if self.reason else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "rank": self.rank,
            "window": self.window,
            "batch": self.batch,
            "committed_updates": self.committed_updates,
            "checkpoint": self.checkpoint,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Failure:
        names = ("reason", "rank", "window", "committed_updates", "checkpoint")
        return cls(**{name: value[name] for name in names}, batch=value.get("batch"))  # older ledgers have none

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        when = "" if self.window is None else f" in window {self.window}"
        when += f" ({self.batch})" if self.batch else ""
        source = f", resumed from {self.checkpoint}" if self.checkpoint else ""
        return f"{self.reason.splitlines()[0] if self.reason else 'no reason known'}{where}{when}{source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    after_seconds: float
    number: int
    """Restarts without committed progress so far, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How often to start again without committed progress in between."""

    same: int = 2
    any: int = 4

    @classmethod
    def of(cls, max_restarts: int) -> Limits:
        """`--max-restarts K`: K for one and the same failure, twice that for whatever happens."""
        if max_restarts < 0:
            raise UsageError(f"--max-restarts {max_restarts}: give 0 or more")
        return cls(same=max_restarts, any=2 * max_restarts)


def next_step(failures: Sequence[Failure], limits: Limits) -> Restart | GiveUp:
    """What follows the last of `failures`, the run's whole ledger in order."""
    latest = failures[-1]
    furthest = max(failure.committed_updates for failure in failures)
    first = next(number for number, failure in enumerate(failures) if failure.committed_updates == furthest)
    without_progress = failures[first:]  # a fall-back to an older checkpoint is no progress either
    same = [failure for failure in without_progress if failure.signature == latest.signature]
    if len(same) > limits.same or len(without_progress) > limits.any:
        listed = "\n  ".join(str(failure) for failure in without_progress[-limits.any - 1 :])
        return GiveUp(
            evidence=f"{len(without_progress)} starts failed without committed progress beyond update "
            f"{furthest}:\n  {listed}"
        )
    number = len(without_progress)
    return Restart(number=number, after_seconds=min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** (number - 1)))
