"""Whether what must happen after a notice fits before the kill: from measured times, pure.

inside a window
rest of the window + save + teardown + margin ≤ seconds left    finish it, then decide at the edge
otherwise                                                       drop it, and decide for the edge before it

at an edge
save + teardown + margin ≤ seconds left    save the state of this edge, then leave
otherwise                                  leave without a save that could not be committed; the last one stays
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from samerun.core.units import format_seconds, parse_seconds
from samerun.plan.availability.deadline import KNOWN_LINKS, Link, Outcome, Path, PreemptPlan, link, plan_preempt
from samerun.preempt.sources import AwsSpotNotice, NoticeSource

_REMEMBERED: Final = 20
TEARDOWN_SECONDS: Final = 2.0
"""Closing workers and the process group, seen on CPU; a constant until a run measures its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What a run knows about being told to stop.

    `warning`: how long there is between a SIGTERM and the kill ("120 s"); None: as long as the launcher gives, or
    unknown. `chain`: the links of the kill chain, as `samerun plan preempt --chain` takes them ("kubernetes=600s", or
    "kubernetes" for its default). `margin`: spare time to keep. `sources`: notices to poll for.
    """

    warning: str | None = None
    margin: str = "2 s"
    sources: tuple[NoticeSource, ...] = ()
    chain: tuple[str, ...] = ()

    def links(self, *, launcher_seconds: float | None) -> tuple[Link, ...]:
        """The kill chain as far as it is known. Raises UsageError for a link without a time and without a default."""
        found = [] if self.warning is None else [Link(name="warning", warning_seconds=parse_seconds(self.warning))]
        found += [link(text) for text in self.chain]
        if launcher_seconds is not None and all(each.name != "torchrun" for each in found):
            found.append(Link(name="torchrun", warning_seconds=launcher_seconds))
        return tuple(found)


def assumed_links(preemption: Preemption, known: Sequence[Link], schedulers: Sequence[str]) -> tuple[Link, ...]:
    """Links that are there although nobody said how long they give, by their defaults: schedulers, polled clouds.

    They serve the check at start only: a deadline that is only assumed must not end a run without its save.
    """
    if preemption.warning is not None:
        return ()
    said = {each.name for each in known}
    there = [*schedulers, *(source.link for source in preemption.sources if isinstance(source, AwsSpotNotice))]
    return tuple(Link(name=name, warning_seconds=KNOWN_LINKS[name]) for name in there if name not in said)


class Slowest:
    """The largest of the last twenty durations: a bound that forgets, where a mean would be too hopeful."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def seconds(self) -> float | None:
        """None while nothing was measured."""
        return max(self._last, default=None)


def finishing_fits(
    *,
    seconds_left: float | None,
    window_left_seconds: float | None,
    save_seconds: float | None,
    margin_seconds: float,
) -> bool:
    """Whether the open window can be finished and saved. Where something is unknown it is finished: the kill, not a
    guess, takes its work away then, and the last checkpoint stays either way."""
    if seconds_left is None or window_left_seconds is None:
        return True
    return window_left_seconds + (save_seconds or 0.0) + TEARDOWN_SECONDS + margin_seconds <= seconds_left


class Leave(Enum):
    SAVE = "save, then leave"
    AT_ONCE = "leave without saving"


def decide(*, seconds_left: Sequence[float | None], save_seconds: float | None, margin_seconds: float) -> Leave:
    """What to do at the edge where a stop was agreed. `seconds_left` holds every rank's; the nearest deadline counts.

    An unmeasured save is tried: a torn one is never loaded, and the last checkpoint stays.
    """
    known = [seconds for seconds in seconds_left if seconds is not None]
    if not known or save_seconds is None:
        return Leave.SAVE
    need = save_seconds + TEARDOWN_SECONDS + margin_seconds
    return Leave.SAVE if need <= min(known) else Leave.AT_ONCE


def check_budget(
    links: tuple[Link, ...], *, window_seconds: float, save_seconds: float, margin_seconds: float
) -> PreemptPlan | None:
    """The measured path against the kill chain; None where no link is known."""
    if not links:
        return None
    path = Path(
        window_seconds=window_seconds,
        save_seconds=max(save_seconds, 1e-3),
        teardown_seconds=TEARDOWN_SECONDS,
        margin_seconds=margin_seconds,
    )
    return plan_preempt(links, path)


_SHORT: Final = {
    Outcome.DROP_WINDOW: "an open window is dropped and its last edge saved",
    Outcome.DOES_NOT_FIT: "what was done since the last save would be lost",
}


def describe_budget(plan: PreemptPlan, *, assumed: Sequence[Link] = ()) -> str:
    """One sentence: does a stop fit into the warning, and which link limits it."""
    need = format_seconds(plan.path.total_seconds)
    guess = ""
    if plan.limiting_link in {each.name for each in assumed}:
        guess = f", by its default: tell yours, Preemption(chain=('{plan.limiting_link}=60s',))"
    warning = f"{format_seconds(plan.warning_seconds)} of warning (limited by {plan.limiting_link}{guess})"
    parts = (
        f"window {format_seconds(plan.path.window_seconds)}, save {format_seconds(plan.path.save_seconds)}, "
        f"notice, teardown and margin "
        f"{format_seconds(plan.path.notice_seconds + plan.path.teardown_seconds + plan.path.margin_seconds)}"
    )
    if plan.verdict is Outcome.FITS:
        return f"a stop needs {need} ({parts}) and has {warning}"
    return f"a stop needs {need} ({parts}) but has only {warning}: {_SHORT[plan.verdict]}; {plan.remedy}"
