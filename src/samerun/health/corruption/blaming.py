"""What is computed a second time, and whom the answer blames: bad windows by their inputs, forwards by their digests.

Windows are chosen by their number alone, or are ones that every rank has skipped, so that all ranks take part. A look
that fails is named once and switched off on its rank, which goes on taking part with empty answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from samerun.core.events import Journal
from samerun.health.guard import Guard

if TYPE_CHECKING:
    from samerun.health.corruption.looking import Verdict
    from samerun.health.corruption.replaying import Call
    from samerun.health.monitor import Surroundings
    from samerun.health.nonfinite import Culprit

MAX_REPLAYS: Final = 5
"""Replays of bad windows in one attempt; each costs a forward of the window."""


class Blaming:
    """One attempt's. `begin`, `at` …, `rejected` for a bad window, `end`; `close` after the last one.

    Lookout and keeper are None where forwards hold collectives: then nothing is computed again.
    """

    def __init__(self, around: Surroundings, guard: Guard, findings: Journal) -> None:
        self._group = around.group
        self._guard = guard
        self._lookout = around.lookout
        self._keeper = around.keeper
        self._autocast = around.autocast
        self._every = around.options.replay_windows
        self._journal = around.journal
        self._findings = findings
        self._tell = around.tell
        self._looks_at: str | None = None
        """The point at which every rank computes a forward again; None in windows without."""
        self._num_replays = 0
        self._num_rejected = 0

    def begin(self, window: int) -> None:
        if self._keeper is not None:
            self._keeper.begin()
        self._looks_at = None
        if self._lookout is None or self._every is None:
            return
        self._lookout.replayer.end()  # of a window that was dropped in its middle
        if window % self._every == 0:
            self._looks_at = f"window:{window}.step"
            self._guard.call("replay", self._lookout.replayer.begin, default=None)

    def at(self, point: str) -> None:
        """Looks again before the step of a window that was chosen for it. Collective there."""
        if self._looks_at != point:
            return
        self._looks_at = None
        lookout = self._lookout
        assert lookout is not None
        self._guard.call("replay", lookout.replayer.raise_problem, default=None)
        verdict = lookout.look(lambda run, failed: self._guard.call("replay", run, default=failed))
        lookout.replayer.end()
        if verdict is not None:
            self._told(int(point.removeprefix("window:").removesuffix(".step")), "a forward computed again", verdict)

    def rejected(self, window: int) -> None:
        """After a window that was skipped on every rank for a loss that was not finite. Collective."""
        self._guard.call("non-finite replay", self._replay, window, default=None)
        self._attribute(window)

    def end(self) -> None:
        """The window is over."""
        if self._keeper is not None:
            self._keeper.end()

    def close(self) -> None:
        if self._lookout is not None:
            self._lookout.replayer.end()
        self.end()

    def _replay(self, window: int) -> None:
        if self._keeper is None or self._num_replays >= MAX_REPLAYS:
            return
        self._num_replays += 1
        culprit: Culprit | None = self._keeper.replay(self._autocast())
        found = None if culprit is None else culprit.to_json()
        self._findings.write("non_finite", window=window, culprit=found)
        if culprit is not None:
            self._tell(f"rank {self._group.rank}, window {window}: not finite first in the {culprit}")

    def _attribute(self, window: int) -> None:
        lookout, keeper = self._lookout, self._keeper
        self._num_rejected += 1
        if lookout is None or keeper is None or self._num_rejected > MAX_REPLAYS:
            return
        none: list[Call] = []
        calls = self._guard.call(
            "attribution", lambda: [lookout.replayer.call_of(*call) for call in keeper.calls], default=none
        )
        state_is_bad = self._guard.call("attribution", keeper.state_is_bad, default=False)
        verdict = lookout.rejected(
            lambda run, failed: self._guard.call("attribution", run, default=failed),
            calls,
            state_is_bad=state_is_bad,
        )
        if verdict is not None:
            self._told(window, "a loss that was not finite", verdict)

    def _told(self, window: int, what: str, verdict: Verdict) -> None:
        self._journal.write("blame", window=window, what=what, **verdict.to_json(), sync=True)
        if self._group.rank == 0:
            self._tell(f"window {window}: {what}: {verdict}")
