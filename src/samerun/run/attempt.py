"""One attempt: everything that exists between a run's start and its end in this process.

edge:      trace → stop if agreed → a save that is over → save if due → stop if agreed meanwhile → end at the goal
inside:    told to stop, and finishing no longer fits: all ranks drop the window before the same microbatch
decided:   cursor, counters, history, learning rate; flags for the coming edge
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from samerun.checkpoint import Entry, Store
from samerun.core.clock import Clock
from samerun.core.component import Component
from samerun.core.environ import Launcher
from samerun.core.events import Journal
from samerun.core.progress import Progress
from samerun.data.source import DataWindow
from samerun.errors import UsageError, WindowError
from samerun.health.attach import decided_of
from samerun.health.monitor import Monitor
from samerun.preempt.flag import StopFlag
from samerun.preempt.spans import WINDOW
from samerun.preempt.votes import Votes
from samerun.ranks.group import Group
from samerun.ranks.topology import Topology
from samerun.run.acting import Actor
from samerun.run.config import RunConfig
from samerun.run.ending.leaving import Leaving
from samerun.run.ending.midwindow import Midwindow
from samerun.run.ending.stopping import Stopping
from samerun.run.faults import FaultPoints
from samerun.run.goal import Goal
from samerun.run.history import Coverage, Losses
from samerun.run.keeping.samples import SampleLedger, open_samples
from samerun.run.keeping.saving import Saving
from samerun.run.starting.announce import say
from samerun.run.starting.start import Started
from samerun.run.trace import Trace
from samerun.state.extra import Extra
from samerun.step.engine import Engine
from samerun.step.noise import NoiseEstimate
from samerun.step.outcome import Decision
from samerun.step.parallel.agree import Flags
from samerun.step.schedule import step_schedulers
from samerun.step.window import Window, WindowDropped

EVALUATE: Final = "evaluate"
"""A phase, and a point for planned faults."""
_BEST: Final = "best"
_MICROBATCH: Final = ".microbatch:"


@dataclass(slots=True)
class Live:
    """What moves while the attempt runs; components read and write it."""

    progress: Progress = field(default_factory=Progress)
    losses: Losses = field(default_factory=Losses)
    coverage: Coverage = field(default_factory=Coverage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an attempt works with, built by `run.opening`."""

    config: RunConfig
    topology: Topology
    group: Group
    background: Group | None
    """The same ranks, for the thread of background saves alone."""
    store: Store
    engine: Engine
    components: Sequence[Component]
    live: Live
    facts: Mapping[str, Any]
    launcher: Launcher
    clock: Clock
    stop: StopFlag
    faults: FaultPoints


class Attempt:
    def __init__(
        self,
        parts: Parts,
        started: Started,
        *,
        journal: Journal,
        trace: Trace,
        votes: Votes | None = None,
        health: Monitor | None = None,
        actor: Actor | None = None,
    ) -> None:
        self._parts = parts
        self.started = started
        self.journal = journal
        self.trace = trace
        self._health = health
        self._actor = actor
        self._samples = SampleLedger(
            open_samples(parts.config.path, started.attempt, leads=self.leads),
            replicas=parts.topology.num_replicas,
            say=say,
        )
        self._stop_told = False
        self.open_batch: str | None = None
        """Which samples the open window holds; None between windows."""
        self._window_began: float | None = None
        self.stopping = Stopping(
            parts.stop,
            parts.config.preemption,
            group=parts.group,
            store=parts.store,
            launcher=parts.launcher,
            clock=parts.clock,
            attempt=started.attempt,
        )
        own = [component for component in parts.components if isinstance(component, Extra)]
        self._midwindow = Midwindow(votes, parts.group, own, self.stopping)
        self.saving = Saving(
            parts,
            started,
            journal=journal,
            samples=self._samples,
            landed=self._landed,
            enter=self.enter,
        )
        self.leaving = Leaving(
            parts,
            journal=journal,
            stopping=self.stopping,
            midwindow=self._midwindow,
            saving=self.saving,
            actor=actor,
        )

    @property
    def progress(self) -> Progress:
        return self._parts.live.progress

    def edge(self, goal: Goal | None) -> bool:
        """Everything that happens between two windows. False once the goal is reached. Collective.

        Raises Stopped after an agreed stop, saved if that still fits; DoNotRestart when a newer attempt owns the run.
        """
        parts = self._parts
        parts.faults.at(f"edge:{self.progress.windows}")
        self._samples.began(parts.config.source, attempt=self.started.attempt, window=int(self.progress.windows))
        self.trace.edge(self.progress, parts.components)
        self.stopping.spans.look()
        self._midwindow.at_edge(self.stopping.windows.seconds)
        reached = goal is None or goal.is_reached(self.progress)
        if goal is not None and self._actor is not None:
            self._actor.heading_for(goal)
        self.leaving.abandon_if_agreed()
        if self.leaving.is_stop_agreed() and not reached:
            self.leaving.stop()
        self.saving.at_edge()
        if self._health is not None:
            self._health.edge(int(self.progress.windows))
        if reached:  # there is no further window that would carry the word
            self.leaving.leave_as_decided()
        if self.saving.is_due() or (reached and self.saving.durable != self.progress):
            self.saving.begin(heed_stop=not reached)
            if not reached and self.leaving.ask():  # it may have waited for the save before
                self.leaving.stop()
        if reached:
            self.saving.require_durable()
        self.leaving.say_budget()
        self._window_began = parts.clock.monotonic_seconds()
        self.stopping.spans.enter(WINDOW)
        return not reached

    def window(self, data: DataWindow) -> Window:
        self.open_batch = f"positions {data.start} to {data.end}, epoch {data.epoch}"
        self._parts.engine.require_even(is_even=data.num_microbatches % self._parts.topology.num_replicas == 0)
        self._midwindow.begin(data.index, data.num_microbatches // self._parts.topology.num_replicas)
        return Window(
            self._parts.engine,
            data if self._health is None else self._health.begin(data),
            index=int(self.progress.windows),
            flags=self._flags,
            decided=lambda decision: self._decided(data, decision),
            at=self._at,
        )

    def evaluated(self, name: str, value: float, *, better: str | None) -> None:
        """Records an evaluation; an improvement is saved and tagged at the coming edge."""
        windows, updates = int(self.progress.windows), int(self.progress.updates)
        improved = self._parts.live.losses.evaluated(name, value, better=better, update=updates)
        if improved and _BEST not in self.saving.tags:
            self.saving.tags.append(_BEST)
        self.journal.write("evaluated", name=name, value=repr(value), improved=improved, windows=windows)

    def noise(self) -> NoiseEstimate:
        probe = self._parts.engine.noise
        if probe is None:
            raise UsageError("nothing is measured: pass noise_every=10 (windows) to Run")
        return probe.estimate()

    def mean_over_ranks(self, value: float) -> float:
        """Collective; also learns of a notice that came during a long evaluation, before another window is begun."""
        answers = self._parts.group.gather([value, self._parts.stop.is_set])
        self.leaving.noticed(stop=any(stop for _, stop in answers))
        return float(sum(value for value, _ in answers) / len(answers))

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the run."""
        return self._parts.group.rank == 0

    def close(self, error: BaseException | None) -> None:
        """The end of the attempt, by `error` if there is one. Raises only where nothing else has ended it."""
        try:
            self.saving.close(error)
        finally:
            self._close()

    def _close(self) -> None:
        if self._health is not None:
            self._health.close()
        self._midwindow.close()
        self.journal.close()
        self._samples.close()
        self.trace.close()
        self._parts.group.close()
        if self._parts.background is not None and self.saving.is_idle:  # never under the feet of a thread that uses it
            self._parts.background.close()

    def alive(self) -> bool:
        """A sign of life from a long section of the user's; whether this rank was told to stop."""
        self.stopping.spans.look()
        self.enter("section of the user's own")
        if self._parts.stop.is_set and not self._stop_told:
            self._stop_told = True
            left = self._parts.stop.seconds_left()
            known = "" if left is None else f", {left:.0f} s left"
            self._midwindow.noticed()
            say(f"rank {self._parts.group.rank}: told to stop{known}; the stop is agreed on at the next edge")
        return self._parts.stop.is_set

    def enter(self, phase: str) -> None:
        """What the loop does from now on, for whoever watches how long it takes."""
        self.stopping.spans.enter(phase)
        if self._health is not None:
            self._health.enter(phase, f"after window {int(self.progress.windows) - 1}")
        if phase == EVALUATE:
            self._parts.faults.at(EVALUATE)

    def failed(self, error: BaseException) -> None:
        """The loop ended by an exception, a stop included: what was seen last is kept, a save in flight waited for."""
        self.saving.close(error)
        if self._health is not None:
            self._health.dump(f"{type(error).__name__}: {error}")

    def _landed(self, entry: Entry, seconds: float) -> None:
        """A checkpoint of this attempt became durable, so many seconds after it was begun."""
        self.stopping.saves.add(seconds)
        if self._actor is not None:
            self._actor.saved(entry)

    def _decided(self, data: DataWindow, decision: Decision) -> None:
        parts, live, agreed = self._parts, self._parts.live, decision.agreed
        if data.coverage is not None and agreed.coverage != data.coverage:
            raise WindowError(
                f"window {data.index}: the samples that arrived are not those of positions {data.start} to {data.end}; "
                f"a dataset, sampler or worker changed the order"
            )
        parts.config.source.commit(data)
        live.progress = decision.progress_after(live.progress)
        self._samples.decided(data, decision)
        alert = live.losses.after(decision)
        live.coverage.after(agreed)
        step_schedulers(parts.config.schedulers, decision)
        for name, outcome in decision.skipped.items():
            self.journal.write(
                "skipped",
                window=data.index,
                optimizer=name,
                reason=outcome.reason.value,
                loss=repr(outcome.loss),
                scale=outcome.scale,
            )
        self._say_noise(data.index)
        if alert is not None:
            self.journal.write("skip_rate", alert=alert, value=live.losses.skips.value)
            if self.leads:
                say(alert)
        self.leaving.decided(agreed)
        self._midwindow.decided()
        self.open_batch = None
        self.stopping.spans.enter("loop body")
        self.saving.decided(agreed)
        if self._window_began is not None:
            self.stopping.windows.add(parts.clock.monotonic_seconds() - self._window_began)

        if self._health is not None:
            self._health.decided(decided_of(data, decision))

    def _say_noise(self, window: int) -> None:
        probe = self._parts.engine.noise
        if probe is not None and probe.last is not None:
            self.journal.write("noise", window=window, **asdict(probe.last))  # what `samerun plan noise RUN` reads

    def _at(self, point: str) -> None:
        if self._health is not None:
            self._health.at(point)
        self._parts.faults.at(point)
        if not self._midwindow.is_open:
            return
        _, found, slot = point.rpartition(_MICROBATCH)
        if found and self._midwindow.is_dropped_at(int(slot)):
            raise WindowDropped(lambda: self.leaving.drop_window(int(slot)))

    def _flags(self) -> Flags:
        return Flags(
            stop=self._parts.stop.is_set,
            abandon=self.stopping.must_abandon() or (self._actor is not None and self._actor.ending is not None),
            **self.saving.flags(),
        )
