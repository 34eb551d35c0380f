"""When an attempt must end before its goal: a notice, a dead launcher, a newer attempt. Decided alike on all ranks."""

from __future__ import annotations

import os
from typing import Final

from samerun.checkpoint import Store
from samerun.core import environ
from samerun.core.clock import Clock
from samerun.core.environ import Launcher
from samerun.core.units import parse_seconds
from samerun.errors import DoNotRestart, Stopped, StorageError
from samerun.plan.availability.deadline import Outcome
from samerun.preempt.budget import (
    TEARDOWN_SECONDS,
    Leave,
    Preemption,
    Slowest,
    assumed_links,
    check_budget,
    decide,
    describe_budget,
    finishing_fits,
)
from samerun.preempt.flag import StopFlag
from samerun.preempt.spans import Spans
from samerun.ranks.group import Group
from samerun.run.ending.last_words import launcher_seconds
from samerun.run.ending.timings import Timings

_FENCE_SECONDS: Final = 5.0
"""How often rank 0 looks for a newer attempt; before each save the store looks again."""

_PAUSE_SECONDS: Final = 60.0
"""How long no one looks after the storage could not be asked: each question may take as long as that."""


class Stopping:
    """What this rank sees, and what all ranks make of it at an edge."""

    def __init__(
        self,
        flag: StopFlag,
        preemption: Preemption,
        *,
        group: Group,
        store: Store,
        launcher: Launcher,
        clock: Clock,
        attempt: int,
    ) -> None:
        self.flag = flag
        self.windows = Slowest()
        self.saves = Slowest()
        self._preemption = preemption
        self._group = group
        self._store = store
        self._launcher = launcher
        self._clock = clock
        self._attempt = attempt
        self._parent_process = os.getppid()
        self._fence_checked = clock.monotonic_seconds()
        self._newer_attempt = 0
        self._links = preemption.links(launcher_seconds=launcher_seconds(launcher))
        self._assumed = assumed_links(preemption, self._links, environ.schedulers())
        self._budget_said: Outcome | None = None
        self.spans = Spans(clock, num_left_out=2)

    def must_abandon(self) -> bool:
        """Whether this rank may not save any more: its launcher died, or a newer attempt has begun."""
        orphaned = self._launcher.supervised and os.getppid() != self._parent_process
        return orphaned or self._is_superseded()

    def recall(self, last: Timings) -> None:
        """What the attempt before this one measured, until this one has measured itself."""
        for slowest, seconds in ((self.windows, last.window_seconds), (self.saves, last.save_seconds)):
            if seconds is not None:
                slowest.add(seconds)

    @property
    def timings(self) -> Timings:
        return Timings(
            window_seconds=self.windows.seconds,
            save_seconds=self.saves.seconds,
            span_seconds=self.spans.longest_seconds,
            span_phase=self.spans.longest_phase,
        )

    def must_drop(self, window_left_seconds: float | None) -> bool:
        """Whether this rank was told to stop and the rest of the open window, with its save, no longer fits."""
        return self.flag.is_set and not finishing_fits(
            seconds_left=self.flag.seconds_left(),
            window_left_seconds=window_left_seconds,
            save_seconds=self.saves.seconds,
            margin_seconds=parse_seconds(self._preemption.margin),
        )

    def decide(self) -> Leave:
        """Collective: whether the state of this edge can still be saved."""
        return decide(
            seconds_left=self._group.gather(self.flag.seconds_left()),
            save_seconds=max((s for s in self._group.gather(self.saves.seconds) if s is not None), default=None),
            margin_seconds=parse_seconds(self._preemption.margin),
        )

    def seconds_to_spare(self) -> float | None:
        """Collective: how long an earlier save may still be waited for; None where no rank knows a deadline."""
        known = [seconds for seconds in self._group.gather(self.flag.seconds_left()) if seconds is not None]
        needed = TEARDOWN_SECONDS + parse_seconds(self._preemption.margin)
        return max(0.0, min(known) - needed) if known else None

    def budget_warning(self) -> str | None:
        """Once both times are known: what a stop needs and has, if a kill chain is. Said again when it gets worse."""
        if self.windows.seconds is None or self.saves.seconds is None:
            return None
        plan = check_budget(
            (*self._links, *self._assumed),
            window_seconds=max(self.windows.seconds, self.spans.longest_seconds),
            save_seconds=self.saves.seconds,
            margin_seconds=parse_seconds(self._preemption.margin),
        )
        if plan is None or (self._budget_said is not None and not _is_worse(plan.verdict, self._budget_said)):
            return None
        self._budget_said = plan.verdict
        return describe_budget(plan, assumed=self._assumed)

    def stopped(self, *, saved_name: str | None, current: bool, dropped: str = "", why_not: str = "") -> Stopped:
        """The end of an attempt that was told to stop; `current`: the newest checkpoint holds this very edge.

        `dropped` says which window was left in its middle; `why_not`, why this edge could not be saved.
        """
        reason = self.flag.stop.reason if self.flag.stop else "a notice on another rank"
        why_not = why_not or "a save would not fit"
        kept = f"saved as {saved_name}" if current else f"not saved: {why_not}; {_newest(saved_name)}"
        span = f"longest time without an edge: {self.spans}"
        return Stopped(f"stopped by {reason}{dropped}, {kept} ({span}); start me again")

    def abandoned(self, *, saved_name: str | None) -> Stopped | DoNotRestart:
        if self._newer_attempt > self._attempt:
            return DoNotRestart(
                f"attempt {self._newer_attempt} has taken over this run; attempt {self._attempt} stops without saving; "
                f"{_newest(saved_name)}"
            )
        return Stopped(f"the launcher of this attempt died; stopped without saving; {_newest(saved_name)}")

    def _is_superseded(self) -> bool:
        now = self._clock.monotonic_seconds()
        if self._group.rank == 0 and now - self._fence_checked >= _FENCE_SECONDS:
            self._fence_checked = now
            try:
                self._newer_attempt = self._store.newest_attempt()
            except StorageError:  # a store that is down stops no training: the next save looks again, and raises
                self._fence_checked = self._clock.monotonic_seconds() + _PAUSE_SECONDS
        return self._newer_attempt > self._attempt


def warning_seconds(preemption: Preemption, launcher: Launcher) -> float | None:
    """What a SIGTERM leaves: the shortest known link of the kill chain."""
    links = preemption.links(launcher_seconds=launcher_seconds(launcher))
    return min((link.warning_seconds for link in links), default=None)


def _is_worse(now: Outcome, before: Outcome) -> bool:
    order = list(Outcome)
    return order.index(now) > order.index(before)


def _newest(saved_name: str | None) -> str:
    return f"the newest checkpoint is {saved_name}" if saved_name else "nothing was ever saved"
