"""Faults on purpose, for drills: who, when, what, read from `SAMERUN_FAULTS`.

    {"schema": "samerun.faults.v1",
     "trace": "DIR",                       where each rank writes what it holds at each edge; absent: nowhere
     "leave_out": ["moments"],             components that a resume leaves fresh, to prove that checks can fail
     "faults": [{"at": "window:13.microbatch:2", "rank": 1, "do": "kill", "from_window": 0}]}

`at` names a point inside a run: `window:N.microbatch:M`, `window:N.step`, `edge:N`, `save:writing`, `save:manifest`,
`save:committed`, `save:op:N` (before the N-th file operation that a save makes), `load`. `do` is one of

    kill, term, interrupt           a signal to this process
    mark                            nothing but the record; a drill that sees it acts from outside
    term_launcher, kill_launcher    a signal to the parent process
    raise                           FaultError, for tests that cannot spare their process
    stall                           this rank sleeps for `seconds`
    non_finite                      the next forward of a module gives NaN
    full_disk, slow_disk            this and every later file operation of a save fails with ENOSPC, or takes `seconds`

`from_window` arms a fault only from that window on. Disk deeds belong to `save:op:N` points.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from samerun.core.environ import FAULTS_VARIABLE
from samerun.errors import SamerunError, UsageError
from samerun.format.names import CHECKPOINTS
from samerun.storage.posix import Deed as FileDeed
from samerun.storage.posix import Files, Operation

SCHEMA: Final = "samerun.faults.v1"
FIRED: Final = "fired.jsonl"
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
    NON_FINITE = "non_finite"
    FULL_DISK = "full_disk"
    SLOW_DISK = "slow_disk"


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
        self._on_every_operation: Fault | None = None

    def at(self, point: str) -> None:
        if not self._mine:
            return
        fault = self._mine.get(point)
        if fault is not None and self._window() >= fault.from_window:
            del self._mine[point]
            self._remember(fault)
            if fault.deed is Deed.RAISE:
                raise FaultError(f"planned: raise at {point}")
            if fault.deed in (Deed.FULL_DISK, Deed.SLOW_DISK):
                self._on_every_operation = fault
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


def _commit(fault: Fault) -> None:
    deed = fault.deed
    if deed is Deed.MARK:
        return
    if deed is Deed.STALL:
        time.sleep(fault.seconds)
    elif deed is Deed.NON_FINITE:
        _spoil_next_forward()
    elif deed in (Deed.TERM_LAUNCHER, Deed.KILL_LAUNCHER):
        os.kill(os.getppid(), signal.SIGTERM if deed is Deed.TERM_LAUNCHER else signal.SIGKILL)
    else:
        os.kill(os.getpid(), _OWN_SIGNAL[deed])


_OWN_SIGNAL: Final = {Deed.KILL: signal.SIGKILL, Deed.TERM: signal.SIGTERM, Deed.INTERRUPT: signal.SIGINT}


def _spoil_next_forward() -> None:
    """The first module to give a floating tensor gives NaN instead, once: what an overflow in a batch looks like."""
    import torch  # a fault plan is read where torch is loaded anyway; the module itself needs none

    def spoil(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        hook.remove()
        return output * float("nan")

    hook = torch.nn.modules.module.register_module_forward_hook(spoil)


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
