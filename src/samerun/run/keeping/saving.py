"""How a run saves: when it is due, beside training or in its way, and what becomes of a save that failed.

    edge k        the save before is settled; the state of this moment is saved: weights and optimizer memory are
                  sealed, and copied while window k computes; everything else is copied at once
    window k      a fence directly before anything is updated; the write goes on behind it
    edge k + n    once every rank has said in a window's agreement that its save is over: the journal learns what it
                  cost, or the policy says what its failure means; the same on every rank, without a collective

An edge whose state must be durable before the run leaves it (the goal, a stop) waits for its save.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from samerun.core.progress import Progress
from samerun.errors import (
    DamagedError,
    FencedError,
    PeerError,
    SaveFailedError,
    StorageError,
    TornCopyError,
    UsageError,
)
from samerun.run.config import OnSaveError
from samerun.run.starting.announce import say

if TYPE_CHECKING:
    from samerun.checkpoint import Entry
    from samerun.checkpoint.save.pending import Pending
    from samerun.core.events import Journal
    from samerun.run.attempt import Parts
    from samerun.run.keeping.samples import SampleLedger
    from samerun.run.starting.start import Started
    from samerun.step.parallel.agree import Agreed

_ROUND_SECONDS: Final = 1.0
"""How often ranks that wait for a save ask each other whether one was told to stop."""

_LATE: Final = ("weights", "moments", "steps")
"""What only the run's own optimizers change, behind the fence. Everything else may change in the user's loop body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    pending: Pending
    progress: Progress
    tags: tuple[str, ...]
    began_seconds: float


class Saving:
    """`durable` and `durable_name`: what a start would take. Every method without "local" is for all ranks alike."""

    def __init__(
        self,
        parts: Parts,
        started: Started,
        *,
        journal: Journal,
        samples: SampleLedger,
        landed: Callable[[Entry, float], None],
        enter: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._run_id = started.run_id
        self._journal = journal
        self._samples = samples
        self._landed = landed
        self._enter = enter
        self._late: tuple[str, ...] = _LATE
        self._flight: _Flight | None = None
        self._agreed: Agreed | None = None
        self._begun = parts.live.progress if started.checkpoint is not None else None
        self._begun_seconds = parts.clock.monotonic_seconds()
        self._is_wanted = False
        self._is_abandoned = False
        self._budget_told = False
        self.durable = self._begun
        self.durable_name = started.checkpoint
        self.tags: list[str] = []
        """For the coming save; with any, the coming edge is saved."""

    @property
    def is_in_flight(self) -> bool:
        return self._flight is not None

    def is_due(self) -> bool:
        progress = self._parts.live.progress
        if self._begun is None or self._is_wanted or self.tags:
            return True
        agreed = self._agreed is not None and self._agreed.num_save_due > 0 and self._begun != progress
        return agreed or self._parts.config.saves.interval.has_crossed(self._begun, progress)

    def flags(self) -> dict[str, bool]:
        """What this rank tells the others at the end of a window. Local."""
        pending = None if self._flight is None else self._flight.pending
        return {
            "save_due": self._parts.group.rank == 0 and self._has_time_come(),
            "save_over": pending is not None and pending.is_done,
            "save_failed": pending is not None and pending.has_failed,
        }

    def decided(self, agreed: Agreed) -> None:
        self._agreed = agreed

    def at_edge(self) -> None:
        """The save in flight, once it is over on every rank. Raises what the policy makes of a failure."""
        agreed = self._agreed
        if self._flight is not None and agreed is not None and agreed.num_save_over == self._parts.group.size:
            self._land(has_failed=agreed.num_save_failed > 0)

    def begin(self, *, heed_stop: bool = False) -> None:
        """Saves the state of this very moment, once the save before is settled. Raises as `at_edge`. Collective.

        `heed_stop`: nothing is begun when any rank was told to stop while that one was waited for.
        """
        parts = self._parts
        if not self.settle(heed_stop=heed_stop):
            return
        self._enter("save")
        self._samples.sync()
        tags, self.tags = tuple(self.tags), []
        self._begun, self._begun_seconds = parts.live.progress, parts.clock.monotonic_seconds()
        self._is_wanted, self._agreed = False, None
        facts = {**parts.facts, "run_id": self._run_id, "parent": self.durable_name}
        state = {component.name: component.capture() for component in parts.components}
        try:
            # a tagged state comes only once, so it is not left to the chance of a torn copy
            late = () if tags else self._late
            pending = parts.store.save(state, self._begun, facts=facts, tags=tags, late=late)
        except (StorageError, PeerError, DamagedError) as error:  # before anything was in flight; alike on every rank
            self._failed(error, self._begun, tags)
            return
        self._flight = _Flight(pending=pending, progress=self._begun, tags=tags, began_seconds=self._begun_seconds)
        if not pending.in_background:
            self._tell_budget()
            self._land()

    def settle(self, *, heed_stop: bool = False) -> bool:
        """Waits for the save in flight; raises as `at_edge`.

        False on all ranks, with `heed_stop`, once one was told to stop: how long to wait is then another question.
        Collective.
        """
        return self._is_settled(rounds=None, heed_stop=heed_stop)

    def settle_before_stop(self, seconds: float | None) -> bool:
        """Waits for the save in flight for so long, the same on all ranks. A failure is told, not raised: another save
        may still come. False on all ranks when the time was too short: that save is left to itself. Collective.
        """
        rounds = None if seconds is None else math.floor(seconds / _ROUND_SECONDS)
        is_settled = self._is_settled(rounds=rounds, instead="Saving what is held now")
        self._is_abandoned = not is_settled
        return is_settled

    def _is_settled(self, *, rounds: int | None, heed_stop: bool = False, instead: str | None = None) -> bool:
        """Ranks look at each other's saves in rounds, so that all of them wait equally long."""
        if self._flight is None:
            return True
        self._enter("save")
        pending = self._flight.pending
        for number in itertools.count():
            is_over = pending.wait(_ROUND_SECONDS if rounds is None or number < rounds else 0.0)
            said = self._parts.group.gather([is_over, pending.has_failed, self._parts.stop.is_set])
            if all(over for over, _, _ in said):
                self._land(has_failed=any(failed for _, failed, _ in said), instead=instead)
                return True
            if (heed_stop and any(told for _, _, told in said)) or number == rounds:
                return False
        raise AssertionError("unreachable")

    def require_durable(self) -> None:
        """After the last save of a run: raises SaveFailedError, whatever the policy, when this edge is not kept."""
        self.settle()
        if self.durable != self._parts.live.progress:
            raise SaveFailedError(f"the last state of the run could not be saved; {self._kept()}")

    def fence(self) -> None:
        """Returns once the save in flight reads no live memory any more. Local."""
        self._parts.store.fence()

    def close(self, error: BaseException | None) -> None:
        """The end of the attempt, by `error` if there is one. Waits for the save in flight as long as there is time.

        A second Ctrl-C does not wait. Local: raises SaveFailedError only where nothing else ends the attempt.
        """
        if not isinstance(error, KeyboardInterrupt):
            self.await_end(instead=None if error is None else "The run ends, but not of that")

    def await_end(self, *, instead: str | None) -> None:
        """Waits for the save in flight as long as there is time. Local; a failure is told with `instead`, or raised."""
        flight = self._flight
        if flight is None or self._is_abandoned:
            return
        if not flight.pending.wait(self._parts.stop.seconds_left()):
            self._is_abandoned = True
        else:
            self._land(instead=instead)

    @property
    def is_idle(self) -> bool:
        """No thread of a save is left. Local."""
        return self._flight is None or self._flight.pending.is_done

    def _has_time_come(self) -> bool:
        seconds = self._parts.config.saves.interval.seconds
        if seconds is None or (self._flight is not None and not self._flight.pending.is_done):
            return False  # what takes longer than its interval does not hold up training
        return self._parts.clock.monotonic_seconds() - self._begun_seconds >= seconds

    def _land(self, *, has_failed: bool = False, instead: str | None = None) -> None:
        """Whatever became of the flight is known. `instead` of raising what the policy says, that is told."""
        assert self._flight is not None, "there is something to land"
        flight, self._flight = self._flight, None
        try:
            entry = flight.pending.result()
            if has_failed:
                raise PeerError("it failed on another rank")
        except Exception as error:  # noqa: BLE001  # whatever it was: the policy decides, below
            if flight.pending.is_durable and flight.pending.has_failed:  # published; what failed came after
                self.durable, self.durable_name = flight.progress, flight.pending.name
            self._failed(error, flight.progress, flight.tags, instead=instead)
            return
        self.durable, self.durable_name = flight.progress, entry.name
        self._landed(entry, flight.pending.clocks.durable_seconds or 0.0)
        self._journal.write(
            "saved",
            checkpoint=entry.name,
            progress=flight.progress.to_json(),
            tags=list(flight.tags),
            **self._cost(flight),
            sync=True,
        )

    def _cost(self, flight: _Flight) -> dict[str, Any]:
        clocks = {name: round(s, 4) for name, s in asdict(flight.pending.clocks).items() if s is not None}
        cost: dict[str, Any] = {"clocks": clocks, "background": flight.pending.in_background}
        samples = int(self._parts.live.progress.samples) - int(flight.progress.samples)
        seconds = self._parts.clock.monotonic_seconds() - flight.began_seconds
        if samples > 0 and seconds > 0:
            cost["samples_per_second"] = round(samples / seconds, 3)  # training, while this save was in flight
        if flight.pending.retention_error is not None:
            cost["retention_error"] = str(flight.pending.retention_error)
        return cost

    def _failed(
        self, error: Exception, progress: Progress, tags: tuple[str, ...], *, instead: str | None = None
    ) -> None:
        if isinstance(error, (FencedError, UsageError)) and instead is None:
            raise error
        is_torn = isinstance(error, TornCopyError)
        policy = self._parts.config.saves.on_error
        self._record(error, progress, tags, "copy_at_edge" if is_torn else policy.value)
        what = f"the save of update {progress.updates} failed: {error}; {self._kept()}"
        if is_torn:
            self._late, self._is_wanted = (), True
            self._say(f"{what}. This program changes weights before step(), so from now on they are copied at the edge")
        elif policy is OnSaveError.CONTINUE or instead is not None:
            self._say(f"{what}. {instead or 'Going on; the next interval saves again'}")
        else:
            raise SaveFailedError(
                f"{what}. Make room or repair the storage and start again, or pass on_save_error='continue'"
            ) from error

    def _record(self, error: Exception, progress: Progress, tags: tuple[str, ...], policy: str) -> None:
        said = f"{type(error).__name__}: {error}"
        values = {"progress": progress.to_json(), "tags": list(tags), "error": said, "policy": policy}
        try:
            self._journal.write("save_failed", **values, sync=True)
        except OSError as second:  # the disk that refused the save may refuse the journal; the failure is said anyway
            self._say(f"the journal cannot say that a save failed: {second}")

    def _kept(self) -> str:
        return f"{self.durable_name} is whole" if self.durable_name else "nothing was saved before"

    def _tell_budget(self) -> None:
        limit, needed = self._parts.config.saves.max_staging_bytes, self._parts.store.staging_bytes
        if limit is not None and needed > limit and not self._budget_told:
            self._budget_told = True
            self._say(f"a background save needs {needed} bytes for its copies, max_staging_bytes={limit}: saves wait")

    def _say(self, line: str) -> None:
        if self._parts.group.rank == 0:
            say(line)
