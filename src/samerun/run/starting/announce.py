"""What a start says to the person who watches: one line what was decided, then why, then what was restored."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from samerun.errors import SchemaError
from samerun.plan.record import diff, from_json
from samerun.plan.run import RunPlan
from samerun.run.ending.timings import last_timings
from samerun.run.starting.start import Started, StartKind
from samerun.run.starting.surroundings import why_not_bitwise

if TYPE_CHECKING:
    from samerun.ranks.topology import Topology
    from samerun.run.attempt import Attempt
    from samerun.run.config import RunConfig

_UNCHANGED: Final = "exact"


def describe(
    started: Started, *, path: str, topology: str, not_bitwise: Sequence[str], data: str | None = None
) -> list[str]:
    """The lines of a start, first the decision. `data`: what the data source decided about a change, if it did."""
    progress = started.progress
    where = f"update {progress.updates}, window {progress.windows}, {progress.samples} samples"
    if started.kind is StartKind.FRESH:
        return [f"fresh run at {path} (attempt {started.attempt}; {topology})", *_not_taken(started)]
    promise = "bitwise" if not not_bitwise else "within float tolerance"
    how = f"attempt {started.attempt}; {topology}; {promise}"
    lines = [f"{started.kind.value} {path} at {where} from {started.checkpoint} ({how})"]
    lines += _not_taken(started)
    lines += [f"  not bitwise: {reason}" for reason in not_bitwise]
    if data is not None and not data.startswith(_UNCHANGED):
        lines.append(f"  data: {data}")
    lines += [f"  restored: {' '.join(started.restored)}"]
    if started.waived:
        lines += [f"  NOT restored, as asked: {' '.join(started.waived)}"]
    return lines


def _not_taken(started: Started) -> list[str]:
    return [f"  not taken: {passed}" for passed in started.passed]


def say(line: str) -> None:
    """One line on standard error; standard output belongs to the user's program."""
    sys.stderr.write(f"samerun: {line}\n")
    sys.stderr.flush()


def announce(
    attempt: Attempt,
    config: RunConfig,
    topology: Topology,
    facts: Mapping[str, Any],
    remapped: Sequence[str],
    *,
    lead: bool,
) -> None:
    """The lines of the start, and its record in the journal, which is on the disk before the first window."""
    started = attempt.started
    not_bitwise: list[str] = []
    if started.kind is not StartKind.FRESH:
        not_bitwise = why_not_bitwise(started.saved_facts["surroundings"], facts["surroundings"])
        before = started.saved_facts["topology"]
        if before != facts["topology"]:
            not_bitwise.append(
                f"topology was {before}, is {facts['topology']}; random streams are derived, buffers rank 0's"
            )
    planned = _plan_changes(started.saved_facts.get("plan"), config.plan)
    decision = getattr(config.source, "decision", None)
    data_policy = None if decision is None else f"{decision.policy.value}: {decision.reason}"
    if lead:
        for line in describe(
            started, path=config.path, topology=str(topology), not_bitwise=not_bitwise, data=data_policy
        ):
            say(line)
        for line in (*remapped, *(f"plan: {line}" for line in planned)):
            say(f"  {line}")
    attempt.journal.write(
        "started",
        sync=True,
        kind=started.kind.value,
        attempt=started.attempt,
        checkpoint=started.checkpoint,
        progress=started.progress.to_json(),
        passed=[str(passed) for passed in started.passed],
        restored=list(started.restored),
        waived=list(started.waived),
        not_bitwise=not_bitwise,
        data=data_policy,
        plan_changes=planned,
        remapped=list(remapped),
        facts=dict(facts),
    )


def _plan_changes(saved: dict[str, Any] | None, now: RunPlan | None) -> list[str]:
    """What the plan of this start says differently from the one that the checkpoint was saved under."""
    if saved is None or now is None:
        return []
    try:
        before = from_json(saved)
    except SchemaError as error:
        return [f"the saved one cannot be read ({error})"]
    return [str(change) for change in diff(before, now)]


def recall(attempt: Attempt, earlier: list[list[dict[str, Any]]]) -> None:
    """The start line's last part: what the attempt before this one measured, and whether a stop fits by that."""
    last = last_timings(earlier)
    if last is not None:
        attempt.stopping.recall(last)
        say(f"  last attempt: {last}")
        attempt.leaving.say_budget()
