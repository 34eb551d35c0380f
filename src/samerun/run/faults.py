"""Faults on purpose, for drills: who, when, what, read from `SAMERUN_FAULTS`.

    {"schema": "samerun.faults.v1",
     "trace": "DIR",                       where each rank writes what it holds at each edge; absent: nowhere
     "leave_out": ["moments"],             components that a resume leaves fresh, to prove that checks can fail
     "health": {"mode": "act", "checksum_windows": 5},
     "faults": [{"at": "window:13.microbatch:2", "rank": 1, "do": "kill", "from_window": 0}]}

`at` names a point inside a run: `window:N.microbatch:M`, `window:N.step`, `edge:N`, `save:writing`, `save:manifest`,
`save:committed`, `save:op:N` (before the N-th file operation that a save makes), `load`,
`evaluate`. `do` is one of

    kill, term, interrupt           a signal to this process
    mark                            nothing but the record; a drill that sees it acts from outside
    term_launcher, kill_launcher    a signal to the parent process
    raise                           FaultError, for tests that cannot spare their process
    stall                           this rank sleeps for `seconds`
    slow                            this rank sleeps for `seconds` in this and every later microbatch
    non_finite                      the next module to run gives NaN until the window is over
    poison                          the model gives 30 times what it should until the window is over
    flip                            a bit of a parameter flips before the next forward
    full_disk, slow_disk            this and every later file operation of a save fails with ENOSPC, or takes `seconds`

A deed outside a save waits for the save in flight, so that what a drill finds does not hang on the disk's speed; the
points of a save are there to hit one in flight.

`from_window` arms a fault only from that window on. Disk deeds belong to `save:op:N` points. `health` overrides the
run's `HealthOptions`, so that a drill of a short run need not wait for the intervals of a long one.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samerun.core.environ import FAULTS_VARIABLE
from samerun.errors import SamerunError, UsageError
from samerun.format.names import CHECKPOINTS
from samerun.storage.posix import Deed as FileDeed
from samerun.storage.posix import Files, Operation

if TYPE_CHECKING:
    from samerun.run.injuries import Injury

SCHEMA: Final = "samerun.faults.v1"
FIRED: Final = "fired.jsonl"
HITS: Final = "hits.jsonl"
_CHANGES: Final = frozenset(FileDeed) - {FileDeed.OPEN, FileDeed.LOOK, FileDeed.READ, FileDeed.LIST, FileDeed.CLOSE}


class Deed(Enum):
    KILL = "kill"
    TERM = "term"
    INTERRUPT = "interrupt"
    TERM_LAUNCHER = "term_launcher"
    KILL_LAUNCHER = "kill_launcher"
    MARK = "mark"
    RAISE = "raise"
    STALL = "stall"
    SLOW = "slow"
    NON_FINITE = "non_finite"
    POISON = "poison"
    FLIP = "flip"
    FULL_DISK = "full_disk"
    SLOW_DISK = "slow_disk"


def _no_save() -> None:
    """None can be in flight yet."""


class FaultError(SamerunError):
    """The planned deed `raise`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at: str
    rank: int
    deed: Deed
    from_window: int = 0
    seconds: float = 0.0
    """How long a stall or a slow operation takes."""

    def to_json(self) -> dict[str, Any]:
        value = {"at": self.at, "rank": self.rank, "do": self.deed.value, "from_window": self.from_window}
        return {**value, "seconds": self.seconds} if self.seconds else value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Fault:
        return cls(
            at=value["at"],
            rank=value["rank"],
            deed=Deed(value["do"]),
            from_window=value.get("from_window", 0),
            seconds=value.get("seconds", 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    trace: Path | None = None
    leave_out: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    health: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None) -> FaultPlan:
        """Raises UsageError naming what is wrong; a misspelt drill must not pass as a run without faults."""
        if text is None:
            return cls()
        try:
            value = json.loads(text)
            if value.pop("schema") != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA!r}")
            plan = cls(
                trace=Path(trace) if (trace := value.pop("trace", None)) else None,
                leave_out=tuple(value.pop("leave_out", ())),
                faults=tuple(Fault.from_json(fault) for fault in value.pop("faults", ())),
                health=dict(value.pop("health", None) or {}),
            )
            if value:
                raise ValueError(f"unknown entries {sorted(value)}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{FAULTS_VARIABLE} does not hold a fault plan: {error!r}") from error
        return plan

    def to_text(self) -> str:
        return json.dumps(
            {
                "schema": SCHEMA,
                "trace": str(self.trace) if self.trace else None,
                "leave_out": list(self.leave_out),
                "faults": [fault.to_json() for fault in self.faults],
                "health": dict(self.health),
            }
        )


class FaultPoints:
    """Calls `at(point)` commit the planned deeds. Without a plan a call costs one test."""

    def __init__(self, plan: FaultPlan, *, rank: int, window: Callable[[], int]) -> None:
        self._mine = {fault.at: fault for fault in plan.faults if fault.rank == rank}
        self._window = window
        self._record = None if plan.trace is None else plan.trace / FIRED
        self._hits = None if plan.trace is None else plan.trace / HITS
        self.settle: Callable[[], None] = _no_save
        self._on_every_operation: Fault | None = None
        self._slow: Fault | None = None
        self._injuries: list[tuple[str, Injury]] = []
        """With the window that they belong to."""

    def at(self, point: str) -> None:
        if not self._mine and self._slow is None and not self._injuries:
            return
        if self._injuries:
            self._heal(point)
        if self._slow is not None and ".microbatch:" in point:
            time.sleep(self._slow.seconds)
        fault = self._mine.get(point)
        if fault is not None and self._window() >= fault.from_window:
            del self._mine[point]
            self._remember(fault)
            if not point.startswith("save:"):
                self.settle()
            if fault.deed is Deed.RAISE:
                raise FaultError(f"planned: raise at {point}")
            if fault.deed in (Deed.FULL_DISK, Deed.SLOW_DISK):
                self._on_every_operation = fault
            elif fault.deed is Deed.SLOW:
                self._slow = fault
            elif fault.deed in _STRIKES:
                self._strike(fault)
            else:
                _commit(fault)

    def operation(self, number: int) -> None:
        """Before a file operation of a save."""
        self.at(f"save:op:{number}")
        lasting = self._on_every_operation
        if lasting is not None and lasting.deed is Deed.SLOW_DISK:
            time.sleep(lasting.seconds)
        elif lasting is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _strike(self, fault: Fault) -> None:
        from samerun.run import injuries  # torch is loaded where a model runs; the module itself needs none

        strike = getattr(injuries, _STRIKES[fault.deed])
        self._injuries.append((fault.at.partition(".")[0], strike(lambda name: self._note_hit(fault, name))))

    def _heal(self, point: str) -> None:
        """What belongs to a window ends with it."""
        if point.startswith(("window:", "edge:")):
            window = point.partition(".")[0]
            for one in [one for one in self._injuries if one[0] != window]:
                one[1].end()
                self._injuries.remove(one)

    def _note_hit(self, fault: Fault, name: str) -> None:
        """What a fault struck, so that a diagnosis can be held against it."""
        if self._hits is not None:
            self._hits.parent.mkdir(parents=True, exist_ok=True)
            with self._hits.open("a") as out:
                out.write(json.dumps({**fault.to_json(), "hit": name}) + "\n")

    def _remember(self, fault: Fault) -> None:
        """A drill must know that the run died of what was planned, not of something else."""
        if self._record is not None:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            with self._record.open("a") as out:
                out.write(json.dumps(fault.to_json()) + "\n")


def fired(trace: Path) -> list[dict[str, Any]]:
    """The faults that happened, in order."""
    record = trace / FIRED
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def hits(trace: Path) -> list[dict[str, Any]]:
    """What faults of the model struck, in order: the fault, and the name of the parameter or module."""
    record = trace / HITS
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def _commit(fault: Fault) -> None:
    deed = fault.deed
    if deed is Deed.MARK:
        return
    if deed is Deed.STALL:
        time.sleep(fault.seconds)
    elif deed in (Deed.TERM_LAUNCHER, Deed.KILL_LAUNCHER):
        os.kill(os.getppid(), signal.SIGTERM if deed is Deed.TERM_LAUNCHER else signal.SIGKILL)
    else:
        os.kill(os.getpid(), _OWN_SIGNAL[deed])


_OWN_SIGNAL: Final = {Deed.KILL: signal.SIGKILL, Deed.TERM: signal.SIGTERM, Deed.INTERRUPT: signal.SIGINT}


_STRIKES: Final = {Deed.NON_FINITE: "not_a_number", Deed.POISON: "poison", Deed.FLIP: "flip_bit"}


class PlannedFiles(Files):
    """File operations of a store, numbered from 0 in each save, so that a fault can be planned before each."""

    def __init__(self, points: FaultPoints) -> None:
        self._points = points
        self._save = ""
        self._number = 0

    def before(self, operation: Operation) -> None:
        if operation.deed not in _CHANGES:
            return
        if operation.deed in (FileDeed.MAKE_DIRECTORY, FileDeed.CREATE):
            save = _save_of(operation.path)
            if save not in ("", self._save):
                self._save, self._number = save, 0
        if self._save:
            self._points.operation(self._number)
            self._number += 1


def _save_of(path: str) -> str:
    """The checkpoint that a path lies in or is; empty for any other."""
    parts = Path(path).parts
    if CHECKPOINTS not in parts:
        return ""
    position = len(parts) - 1 - parts[::-1].index(CHECKPOINTS)
    return parts[position + 1] if position + 1 < len(parts) else ""
