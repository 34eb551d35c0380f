"""Which checkpoints are *good*: a status that is granted late, since a spike shows after the state that began it.

Good: verified, all RECOVERY_WINDOWS windows after it seen, none of them in an incident that did not recover, and no
open suspicion. The latest checkpoint is therefore never good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from samerun.health.spike.detector import RECOVERY_WINDOWS

MIN_MARGIN: Final = 100
_MAX_MARGIN: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint as a rollback sees it."""

    name: str
    windows: int
    """Windows decided before it was saved."""
    position: int
    """Its cursor in the global sample order."""
    is_verified: bool
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Windows [onset, end) of an incident that did not recover; `end` None while it is open."""

    onset: int
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A checkpoint and why it is or is not the one to go back to."""

    candidate: Candidate
    why_not: str | None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.candidate.name, "windows": self.candidate.windows, "why_not": self.why_not}


def margin(beta2: float | None = None) -> int:
    """Windows to stay before the onset: 100, or the memory of Adam's second moment 2/(1 − β2), at most 500."""
    if beta2 is None or not 0 <= beta2 < 1:
        return MIN_MARGIN
    return max(MIN_MARGIN, min(_MAX_MARGIN, round(2 / (1 - beta2))))


def consider(
    candidates: Sequence[Candidate], *, onset: int, now: int, margin: int, suspects: Sequence[Suspect] = ()
) -> list[Considered]:
    """Every checkpoint, newest first, with the reason against it. `now` is the number of decided windows."""
    newest_first = sorted(candidates, key=lambda candidate: -candidate.windows)
    return [
        Considered(candidate=one, why_not=_why_not(one, onset=onset, now=now, margin=margin, suspects=suspects))
        for one in newest_first
    ]


def in_step(candidates: Sequence[Candidate], *, last_equal: int) -> list[Considered]:
    """Every checkpoint, newest first, where replicas have come apart: those from before they were last seen equal."""
    return [
        Considered(
            candidate=one,
            why_not=None
            if one.is_verified and one.windows <= last_equal
            else "its bytes were not verified"
            if not one.is_verified
            else f"saved after window {last_equal}, when replicas were last seen equal",
        )
        for one in sorted(candidates, key=lambda candidate: -candidate.windows)
    ]


def _why_not(one: Candidate, *, onset: int, now: int, margin: int, suspects: Sequence[Suspect]) -> str | None:
    seen_until = one.windows + RECOVERY_WINDOWS
    if not one.is_verified:
        return "its bytes were not verified"
    if one.windows > onset - margin:
        return f"less than {margin} windows before the onset at {onset}"
    if now < seen_until:
        return f"only {now - one.windows} of the {RECOVERY_WINDOWS} windows after it were seen"
    for suspect in suspects:
        if suspect.onset < seen_until and (suspect.end is None or suspect.end > one.windows):
            return f"an incident that began at window {suspect.onset} is too near"
    return None
