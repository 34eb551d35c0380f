"""Faults on purpose, for drills: who, when, what, read from `SAMERUN_FAULTS`.

    {"schema": "samerun.faults.v1",
     "trace": "DIR",                       where each rank writes what it holds at each edge; absent: nowhere
     "leave_out": ["moments"],             components that a resume leaves fresh, to prove that checks can fail
     "faults": [{"at": "window:13.microbatch:2", "rank": 1, "do": "kill", "from_window": 0}]}

`at` names a point inside a run: `window:N.microbatch:M`, `window:N.step`, `edge:N`, `save:writing`, `save:manifest`,
`save:committed`, `load`. `do` is `kill` (SIGKILL), `term` (SIGTERM to this process), `term_launcher`,
`kill_launcher`, `interrupt` (SIGINT), or `raise` (FaultError, for tests that cannot spare their process).
`from_window` arms a fault only from that window on.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from samerun.core.environ import FAULTS_VARIABLE
from samerun.errors import SamerunError, UsageError

SCHEMA: Final = "samerun.faults.v1"
FIRED: Final = "fired.jsonl"


class Deed(Enum):
    KILL = "kill"
    TERM = "term"
    INTERRUPT = "interrupt"
    TERM_LAUNCHER = "term_launcher"
    KILL_LAUNCHER = "kill_launcher"
    RAISE = "raise"


class FaultError(SamerunError):
    """The planned deed `raise`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at: str
    rank: int
    deed: Deed
    from_window: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"at": self.at, "rank": self.rank, "do": self.deed.value, "from_window": self.from_window}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    trace: Path | None = None
    leave_out: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

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
                faults=tuple(
                    Fault(at=f["at"], rank=f["rank"], deed=Deed(f["do"]), from_window=f.get("from_window", 0))
                    for f in value.pop("faults", ())
                ),
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
            }
        )


class FaultPoints:
    """Calls `at(point)` commit the planned deeds. Without a plan a call costs one test."""

    def __init__(self, plan: FaultPlan, *, rank: int, window: Callable[[], int]) -> None:
        self._mine = {fault.at: fault for fault in plan.faults if fault.rank == rank}
        self._window = window
        self._record = None if plan.trace is None else plan.trace / FIRED

    def at(self, point: str) -> None:
        if not self._mine:
            return
        fault = self._mine.get(point)
        if fault is not None and self._window() >= fault.from_window:
            del self._mine[point]
            self._remember(fault)
            if fault.deed is Deed.RAISE:
                raise FaultError(f"planned: raise at {point}")
            _commit(fault.deed)

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


def _commit(deed: Deed) -> None:
    if deed is Deed.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed is Deed.TERM:
        os.kill(os.getpid(), signal.SIGTERM)
    elif deed is Deed.INTERRUPT:
        os.kill(os.getpid(), signal.SIGINT)
    elif deed is Deed.TERM_LAUNCHER:
        os.kill(os.getppid(), signal.SIGTERM)
    else:
        os.kill(os.getppid(), signal.SIGKILL)
