"""The straggler report: medians of the last windows from every rank, gathered once an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from samerun.health.meter import Times
from samerun.health.spike.robust import median
from samerun.health.straggler.links import is_link_slow
from samerun.health.straggler.persistence import Persistence
from samerun.health.straggler.score import Row, Score, jitter, straggler
from samerun.health.straggler.waits import take_apart

_MIN_WINDOWS: Final = 10
_BASELINE_REPORTS: Final = 3


class LinkWatch:
    """Whether everybody waits longer than before with nobody late: the wire, or the step itself, has become slow.

    The shortest wait of an interval is what the last to arrive saw (`waits.take_apart`); its baseline is the median of
    the first intervals. Not part of a checkpoint: another attempt may have other links.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._told = False

    def judge(self, waits: Sequence[float]) -> tuple[str | None, dict[str, Any] | None]:
        """(sentence to tell, event for the journal) from every rank's median wait; the same on every rank."""
        parts = take_apart(waits)
        if len(self._first) < _BASELINE_REPORTS:
            self._first.append(parts.transfer)
            return None, None
        baseline = median(self._first)
        if baseline <= 0 or not is_link_slow(parts.transfer, baseline, parts.lateness):
            return None, None
        event = {"transfer": parts.transfer, "baseline": baseline, "latest": max(parts.lateness)}
        if self._told:
            return None, event
        self._told = True
        return (
            f"links: all ranks wait {parts.transfer * 1e3:.1f} ms in a window, {baseline * 1e3:.1f} ms before, and "
            f"nobody is late: the network, or the step itself, has become slower"
        ), event


class StragglerWatch:
    """Collects this rank's times; judges every rank's once they are together. Not part of a checkpoint: times are not
    the run's, so an attempt begins without a history of who was slow."""

    def __init__(self, num_ranks: int) -> None:
        self._persistence = Persistence(num_ranks)
        self._times: list[Times] = []
        self._told: set[int] = set()
        self._links = LinkWatch()

    @property
    def num_windows(self) -> int:
        return len(self._times)

    def after(self, times: Times) -> None:
        self._times.append(times)

    def row(self) -> list[float] | None:
        """This rank's medians since the last report, which they end; None for too few windows."""
        seen, self._times = self._times, []
        if len(seen) < _MIN_WINDOWS:
            return None
        own = sorted(times.compute for times in seen)
        tail = own[min(len(own) - 1, math.ceil(0.99 * len(own)) - 1)]
        return [
            median(own),
            median([times.data for times in seen]),
            median([times.wait for times in seen]),
            median([times.microbatches for times in seen]),
            tail,
        ]

    def judge(self, gathered: list[Any]) -> tuple[list[str], dict[str, Any] | None]:
        """(sentences to tell, event for the journal) from every rank's row; the same on every rank."""
        if any(row is None for row in gathered):
            return [], None
        rows = [
            Row(compute=compute, data=data, wait=wait, tokens=tokens, compute_tail=tail)
            for compute, data, wait, tokens, tail in gathered
        ]
        found = straggler(rows)
        lasting = self._persistence.after(None if found is None else found.rank)
        disturbed = jitter(rows)
        about_links, link = self._links.judge([row.wait for row in rows])
        if found is None and not disturbed and link is None:
            return [], None
        sentences = [*self._sentences(found, lasting), *([about_links] if about_links else [])]
        return sentences, {
            "link": link,
            "straggler": None if found is None else found.to_json(),
            "lasts": lasting is not None,
            "times": None if found is None else self._persistence.times(found.rank),
            "jitter": disturbed,
        }

    def _sentences(self, found: Score | None, lasting: int | None) -> list[str]:
        """A slow rank is told once when first seen, and once more when it lasts."""
        if found is None:
            return []
        if lasting is not None and -1 - lasting not in self._told:
            self._told |= {lasting, -1 - lasting}
            return [f"straggler: {found}; it lasts: {self._persistence.times(found.rank)} of the last reports"]
        if found.rank not in self._told:
            self._told.add(found.rank)
            return [f"straggler: {found}"]
        return []
