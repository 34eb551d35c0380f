"""What an attempt holds of health: feeds the records and detectors, tells what they find. Never acts: a Decider may.

Loss and gradient norm are judged on every rank alike, by a detector whose state is in the checkpoint. Times, memory and
replays are each rank's own. Whatever fails in here is named once and switched off; the training goes on.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from samerun.core.clock import Clock, SystemClock
from samerun.core.events import Journal
from samerun.health.corruption.blaming import Blaming
from samerun.health.counters import ERRORS, CounterWatch
from samerun.health.guard import Guard
from samerun.health.hang import WAITING, HangWatch, Overdue, PhaseWatch, missing_ranks, phases_told
from samerun.health.meter import LAST_BACKWARD, BufferSync, Meter, Span, TimedData, Times
from samerun.health.options import HealthOptions
from samerun.health.records.event import WindowRecord, header_line
from samerun.health.records.flight import FlightRecorder
from samerun.health.records.writer import RecordWriter
from samerun.health.report import StragglerWatch
from samerun.health.spike.detector import Finding, Kind, SpikeDetector

if TYPE_CHECKING:
    from samerun.health.corruption.looking import Lookout
    from samerun.health.nonfinite import InputKeeper
    from samerun.ranks.group import Group

_GATHER_SECONDS: Final = 3600.0
"""A rank that evaluates alone keeps the others waiting here; only one that is gone for an hour is an error."""


_TOGETHER_SECONDS: Final = 0.5
"""Short windows are looked at together, this much later at most: one alone, between two forwards with cold caches,
costs four times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One decided window in the terms of health; the same on every rank."""

    window: int
    start: int
    end: int
    coverage: int
    samples: int
    weight: float
    loss: float
    grad_norm: float
    lr: float
    scale: float
    outcome: str
    is_loss_bad: bool


class Decider(Protocol):
    """Who decides about incidents. What raises in here is named once and switched off, like a detector."""

    def found(self, finding: Finding) -> None: ...

    def decided(self, decided: Decided) -> None: ...

    def replicas_differ(
        self, *, window: int, last_equal: int, tensors: Sequence[str], ranks: Sequence[int]
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a monitor works with on this rank."""

    folder: Path | None
    """Of this attempt's health files; None: nothing is written but to the run's journal."""
    attempt: int
    group: Group
    journal: Journal
    """The run's; rank 0's only."""
    tell: Callable[[str], None]
    """One line for the person who watches."""
    is_separable: bool
    """Whether own work and waiting for peers can be told apart."""
    span: Span | None
    """A device's own clock."""
    memory_bytes: Callable[[], int]
    keeper: InputKeeper | None
    """Where bad windows can be replayed."""
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    checksums: Callable[[], Mapping[str, tuple[int, int]]] | None
    """Of state that every replica must hold alike; None where there is none."""
    replicated: Sequence[Any] = ()
    """Models under DDP, as the loop calls them."""
    counters: CounterWatch | None = None
    """Of this rank's device."""
    lookout: Lookout | None = None
    """Who computes forwards again; None where they hold collectives."""
    decider: Decider | None = None
    """Rank 0's: what becomes of what is found; None: it is told, and that is all."""
    options: HealthOptions = field(default_factory=HealthOptions)
    begun_at: int = 0
    """Windows decided when the attempt began: replicas were restored alike then."""
    clock: Clock = field(default_factory=SystemClock)
    together_seconds: float = _TOGETHER_SECONDS
    facts: Mapping[str, Any] = field(default_factory=dict)


class Monitor:
    """One attempt's. Calls in the order of the loop: `begin`, `at` …, `decided`, `edge`; `close` at the end."""

    def __init__(self, around: Surroundings, spikes: SpikeDetector) -> None:
        self._around = around
        self._spikes = spikes
        rank = around.group.rank
        self._guard = Guard(lambda text: around.tell(f"rank {rank}: {text}"))
        self._meter = Meter(is_separable=around.is_separable, span=around.span, clock=around.clock)
        self._buffers = BufferSync(self._meter, around.clock)
        for model in around.replicated:
            self._buffers.watch(model)
        self._flight = FlightRecorder(clock=around.clock)
        head = header_line(rank=rank, attempt=around.attempt, facts=around.facts)
        windows, findings = self._file("windows.jsonl"), self._file("findings.jsonl")
        self._writer = None if windows is None else RecordWriter(windows, head=head)
        self._findings = Journal(findings, clock=around.clock)
        self._stragglers = StragglerWatch(around.group.size)
        self._phases = PhaseWatch(clock=around.clock)
        self._hangs = HangWatch(self._phases, self._overdue, later=self._name_missing)
        self._hangs.start()
        self._waiting: list[tuple[Decided, Times, int]] = []
        """Decided windows that were not looked at yet."""
        self._settled = around.clock.monotonic_seconds()
        self._settling = threading.RLock()
        """The watch for hangs looks at what is left before it dumps."""
        self._checked = -1
        self._last_equal = around.begun_at
        self._sinks = [
            (f"sink {number} {type(sink).__name__}", sink)
            for number, sink in enumerate(around.options.sinks if rank == 0 else ())
        ]
        self._blame = Blaming(around, self._guard, self._findings)
        self._disk_told = False

    def begin(self, data: Any) -> TimedData:
        """A window begins; returns its data, timed."""
        self._meter.begin()
        self._blame.begin(int(data.index))
        where = f"window {data.index}"
        return TimedData(data, self._meter, lambda phase: self.enter(phase, where))

    def at(self, point: str) -> None:
        """A point that the window passes."""
        self._meter.at(point)
        if point.endswith(LAST_BACKWARD):
            self.enter("backward and step", point.removesuffix(LAST_BACKWARD))
        else:
            self._blame.at(point)

    def enter(self, phase: str, where: str) -> None:
        """What the loop does from now on; its deadline is learned."""
        self._flight.phase = f"{phase} ({where})"
        self._phases.enter(phase, where)

    def decided(self, decided: Decided) -> None:
        """A window is over. Costs no collective and no write on this thread, but after a loss that was not finite."""
        times = self._meter.end()
        memory_bytes = self._guard.call("memory", self._around.memory_bytes, default=0)
        with self._settling:
            self._waiting.append((decided, times, memory_bytes))
        since = self._around.clock.monotonic_seconds() - self._settled
        if decided.is_loss_bad or self._around.decider is not None or since >= self._around.together_seconds:
            self.settle()
        if decided.is_loss_bad:
            self._blame.rejected(decided.window)
        self._blame.end()
        self.enter("loop body", f"after window {decided.window}")

    def settle(self) -> None:
        """Looks at every window that was decided: before state is read, ranks compare, or the attempt ends."""
        with self._settling:
            waiting, self._waiting = self._waiting, []
            self._settled = self._around.clock.monotonic_seconds()
            for decided, times, memory_bytes in waiting:
                self._look_at(decided, times, memory_bytes)

    def _look_at(self, decided: Decided, times: Times, memory_bytes: int) -> None:
        record = WindowRecord(
            window=decided.window, start=decided.start, end=decided.end, coverage=decided.coverage,
            samples=decided.samples, tokens=round(decided.weight), loss=decided.loss, grad_norm=decided.grad_norm,
            lr=decided.lr, scale=decided.scale, outcome=decided.outcome, window_seconds=times.window,
            compute_seconds=times.compute, wait_seconds=times.wait, data_seconds=times.data, memory_bytes=memory_bytes,
        )  # fmt: skip
        self._flight.add(record)
        self._guard.call("records", self._write, record, default=None)
        self._guard.call("straggler", self._stragglers.after, times, default=None)
        findings: list[Finding] = self._guard.call(
            "spike", self._spikes.after, window=decided.window, loss=decided.loss, grad_norm=decided.grad_norm,
            default=[],
        )  # fmt: skip
        for finding in findings:
            self._guard.call("spike report", self._found, finding, default=None)
        if self._around.decider is not None:
            self._guard.call("decisions", self._around.decider.decided, decided, default=None)
        for name, sink in self._sinks:
            self._guard.call(name, sink.write, decided.window, _scalars(record), default=None)

    def edge(self, num_windows: int) -> None:
        """Collective: every `report_windows` windows ranks compare their times, every `checksum_windows` their state.
        Both go by the count of windows alone, so that every rank takes part whatever is switched off.
        """
        self.enter("edge", f"edge {num_windows}")
        group = self._around.group
        if num_windows == self._checked or num_windows == 0 or group.size == 1:
            return
        self._checked = num_windows
        if num_windows % self._around.options.report_windows == 0:
            self.settle()
            mine = self._guard.call("straggler", self._stragglers.row, default=None)
            gathered = group.gather(mine, seconds=_GATHER_SECONDS)
            self._guard.call("straggler", self._judge, num_windows, gathered, default=None)
            self._guard.call("device counters", self._count, num_windows, default=None)
        if num_windows % self._around.options.checksum_windows == 0 and self._around.checksums is not None:
            self._compare_replicas(num_windows)

    def dump(self, reason: str) -> None:
        """The flight recorder to disk: on a crash, a hang, a notice."""
        self.settle()
        rank, path = self._around.group.rank, self._file("flight.json")
        if path is None:
            return
        problem = self._flight.dump(path, reason=reason, facts={"rank": rank, "attempt": self._around.attempt})
        if problem is not None:
            self._around.tell(f"rank {rank}: the flight recorder could not be written: {problem}")

    def close(self) -> None:
        self.settle()
        self._phases.leave()
        self._hangs.close()
        if self._writer is not None:
            self._writer.close()
        self._findings.close()
        self._buffers.close()
        self._blame.close()
        for name, sink in self._sinks:
            self._guard.call(name, sink.close, default=None)

    def _file(self, name: str) -> Path | None:
        folder = self._around.folder
        return None if folder is None else folder / f"rank-{self._around.group.rank:05d}.{name}"

    def _write(self, record: WindowRecord) -> None:
        if self._writer is None:
            return
        self._writer.write(record.to_line)
        if self._writer.problem is not None and not self._disk_told:
            self._disk_told = True
            rank = self._around.group.rank
            self._around.tell(f"rank {rank}: health: records are being lost: {self._writer.problem}")

    def _found(self, finding: Finding) -> None:
        self._around.journal.write("health", **_plain(finding.to_json()))
        if self._around.group.rank != 0:
            return
        if finding.kind is not Kind.DRIFT:
            self._around.tell(str(finding))
        if self._around.decider is not None:
            self._guard.call("decisions", self._around.decider.found, finding, default=None)

    def _judge(self, num_windows: int, gathered: list[Any]) -> None:
        sentences, event = self._stragglers.judge(gathered)
        if event is not None:
            self._around.journal.write("straggler", window=num_windows, **event)
        if self._around.group.rank == 0:
            for sentence in sentences:
                self._around.tell(f"window {num_windows}: {sentence}")

    def _count(self, num_windows: int) -> None:
        grown = {} if self._around.counters is None else self._around.counters.grown()
        if grown:
            self._findings.write("device", window=num_windows, counters=grown)
            what = ", ".join(f"{name} +{by:g}" for name, by in grown.items() if name in ERRORS)
            self._around.tell(f"rank {self._around.group.rank}: its device counts errors: {what}")

    def _compare_replicas(self, num_windows: int) -> None:
        from samerun.health.corruption.checksum import compare_replicas

        mine: Mapping[str, tuple[int, int]] = {}
        if self._around.checksums is not None:
            mine = self._guard.call("replica checksums", self._around.checksums, default=mine)
        found = compare_replicas(mine, self._around.group)
        if not found:
            self._last_equal = num_windows
            return
        ranks = sorted({rank for one in found for rank in one.minority})
        self._around.journal.write(
            "replicas_differ", window=num_windows, tensors=[one.name for one in found], ranks=ranks, sync=True
        )
        self.dump("replicas differ")
        if self._around.group.rank == 0:
            others = f" and {len(found) - 1} more tensors" if len(found) > 1 else ""
            self._around.tell(f"window {num_windows}: replicas have drifted apart: {found[0]}{others}")
        if self._around.decider is not None:
            self._guard.call(
                "decisions", self._around.decider.replicas_differ, window=num_windows, last_equal=self._last_equal,
                tensors=[one.name for one in found], ranks=ranks, default=None,
            )  # fmt: skip

    def _overdue(self, found: Overdue) -> None:
        self._findings.write("overdue", **found.to_json())
        self.dump("hang")
        self._around.tell(f"rank {self._around.group.rank}: {found}")

    def _name_missing(self, found: Overdue) -> None:
        """Who keeps a waiting rank waiting, by what the ranks of this file system have said of themselves."""
        folder, group = self._around.folder, self._around.group
        if folder is None or group.size == 1 or found.phase not in WAITING:
            return
        phases = phases_told(folder)
        missing = missing_ranks(phases, num_ranks=group.size)
        told = {rank: phases.get(rank, "silent") for rank in missing}
        self._findings.write("missing", ranks=missing, phases={str(rank): phase for rank, phase in told.items()})
        where = ", ".join(f"rank {rank} ({phase})" for rank, phase in told.items()) or "nobody: all ranks wait"
        self._around.tell(f"rank {group.rank}: waits in {found.where} for {where}")


def _scalars(record: WindowRecord) -> dict[str, float]:
    names = ("loss", "grad_norm", "lr", "scale", "tokens", "window_seconds", "data_seconds", "memory_bytes")
    return {name: float(getattr(record, name)) for name in names}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
