"""How an attempt ends before its goal: whether all ranks know of a stop, what is still saved, the last words.

stop agreed on     → wait for the save in flight as long as there is time, save this edge if that fits, Stopped (75)
a rank may not     → what was decided about an incident, or the launcher's death, or a newer attempt: unsaved
a window dropped   → streams put back, then as for a stop, unless the user's own components changed inside it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from samerun.core.events import Journal
from samerun.core.progress import Progress
from samerun.errors import DoNotRestart, ExitCode, Stop, Stopped
from samerun.health.options import Mode
from samerun.preempt.budget import Leave
from samerun.run.acting import Actor
from samerun.run.ending.midwindow import Midwindow
from samerun.run.ending.stopping import Stopping
from samerun.run.keeping.saving import Saving
from samerun.run.starting.announce import say
from samerun.step.parallel.agree import Agreed

if TYPE_CHECKING:
    from samerun.run.attempt import Parts


class Leaving:
    """One attempt's. Everything but `noticed` and `say_budget` is collective."""

    def __init__(
        self,
        parts: Parts,
        *,
        journal: Journal,
        stopping: Stopping,
        midwindow: Midwindow,
        saving: Saving,
        actor: Actor | None,
    ) -> None:
        self._parts = parts
        self._journal = journal
        self._stopping = stopping
        self._midwindow = midwindow
        self._saving = saving
        self._actor = actor
        self._agreed: Agreed | None = None
        self._is_stop_agreed = False

    def decided(self, agreed: Agreed) -> None:
        """What all ranks said at the end of the last window."""
        self._agreed = agreed

    def noticed(self, *, stop: bool) -> None:
        """All ranks know by other means whether one of them was told to stop."""
        self._is_stop_agreed = self._is_stop_agreed or stop

    def is_stop_agreed(self) -> bool:
        """Whether all ranks know of a stop. The first edge asks by itself: loading and compiling can take long."""
        if self._agreed is None and not self._is_stop_agreed:
            self.ask()
        return self._is_stop_agreed or (self._agreed is not None and self._agreed.num_stop > 0)

    def ask(self) -> bool:
        """Asks all ranks whether one was told to stop."""
        self.noticed(stop=any(self._parts.group.gather(self._parts.stop.is_set)))
        return self._is_stop_agreed

    def abandon_if_agreed(self) -> None:
        """Ends the attempt unsaved where a rank said in the last window that it may not save any more."""
        if self._agreed is None or not self._agreed.num_abandon:
            return
        self.leave_as_decided()
        self._saving.await_end(instead="This attempt ends anyway")  # it was begun while saving was allowed
        self._leave(self._stopping.abandoned(saved_name=self._saving.durable_name))

    def leave_as_decided(self) -> None:
        """What rank 0 has decided about an incident ends the attempt on every rank, unsaved."""
        if self._parts.config.health.mode is not Mode.ACT:
            return
        ending = self._actor.ending if self._actor is not None else None
        word = self._parts.group.broadcast(None if ending is None else [int(ending.exit_code), ending.reason])
        if word is not None:
            code, reason = word
            self._leave(Stopped(reason) if code == ExitCode.STOPPED else DoNotRestart(reason))

    def stop(self, *, dropped: str = "", why_not: str = "") -> NoReturn:
        """Saves this edge if it needs to be saved and that still fits, and ends the attempt."""
        saving = self._saving
        is_settled = not saving.is_in_flight or saving.settle_before_stop(self._stopping.seconds_to_spare())
        is_needed = is_settled and not why_not and (saving.durable != self._progress or bool(saving.tags))
        if is_needed and self._stopping.decide() is Leave.SAVE:
            saving.begin()
            saving.settle()
        current, name = saving.durable == self._progress, saving.durable_name
        self._leave(self._stopping.stopped(saved_name=name, current=current, dropped=dropped, why_not=why_not))

    def drop_window(self, slot: int) -> NoReturn:
        """Every rank is here, before the same microbatch; gradients are dropped, buffers put back."""
        changed = self._midwindow.put_back()
        dropped = f" before microbatch {slot} of window {int(self._progress.windows)}, which is dropped"
        self.stop(dropped=dropped, why_not=f"{', '.join(changed)} changed inside the window" if changed else "")

    def say_budget(self) -> None:
        """Once it is known: what a stop needs and has."""
        line = self._stopping.budget_warning()
        if line is not None and self._leads:
            self._stopping.timings.write(self._journal)
            self._journal.write("budget", text=line)
            say(line)

    def _leave(self, end: Stop) -> NoReturn:
        self._stopping.timings.write(self._journal)
        self._journal.write(
            "ended", code=int(end.exit_code), reason=end.reason, progress=self._progress.to_json(), sync=True
        )
        if self._leads:
            say(end.reason)
        raise end

    @property
    def _progress(self) -> Progress:
        return self._parts.live.progress

    @property
    def _leads(self) -> bool:
        return self._parts.group.rank == 0
