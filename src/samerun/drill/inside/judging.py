"""From traces and journals to a verdict.

wrong        a component was not what its checkpoint says right after a restore (random streams apart: they change no
             sample and no state, only draws), or steps, schedule, cursor or samples differ from the twin's, or a
             damaged checkpoint was loaded, or a bad batch was not skipped
drift        only numbers or draws differ
lost work    all the same, but a start resumed from less than what had been saved, or than what there was time to save
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from samerun.core.units import format_bytes
from samerun.drill.damage import Damaged
from samerun.drill.inside.diagnosis import Diagnosis
from samerun.drill.judgement import Judgement, Kind
from samerun.drill.traces import First, Line
from samerun.drill.verdict import Verdict, compare

EXACT: Final = frozenset({"steps", "scheduler", "cursor", "samples"})
"""Functions of what was decided, not of numbers."""
_DRAWS: Final = frozenset({"rng"})
TOLERANCE: Final = 1e-4
"""Across numbers of ranks: sums in another order, float32, some tens of updates. Absolute, on the final tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    twin: Sequence[Line]
    run: Sequence[Line]
    twin_run: Path
    run_run: Path
    events: Sequence[Mapping[str, Any]]
    """The journal of the run."""
    damaged: Sequence[Damaged] = ()
    warned_windows: Mapping[int, int] | None = None
    bad_window: int | None = None
    """A window with a non-finite batch, which must have been skipped."""
    tolerance: float | None = None
    """Across numbers of ranks: how far final tensors may be apart; None: bitwise."""
    notes: Sequence[str] = ()
    diagnoses: Sequence[Diagnosis] = ()
    abandoned: Mapping[int, int] = field(default_factory=dict)
    """Attempt that ended with a rewind → the window it went back to: what it did after that is not the run's."""


def judge(evidence: Evidence) -> Judgement:
    kept = [line for line in evidence.run if line.window <= evidence.abandoned.get(line.attempt, line.window)]
    evidence = replace(evidence, run=kept)
    verdict = compare(
        list(evidence.twin),
        list(evidence.run),
        twin_path=str(evidence.twin_run),
        other_path=str(evidence.run_run),
    )
    notes = list(evidence.notes)
    if evidence.tolerance is not None:
        verdict, more = _across_topologies(verdict, evidence, evidence.tolerance)
        notes += [*more, *restore_memory(evidence.events)]
    wrong = [*_loaded_damage(evidence), *_not_skipped(evidence)]
    lost = lost_updates(evidence.events, evidence.damaged, evidence.warned_windows or {}, evidence.abandoned)
    unnamed = any(not diagnosis.is_named for diagnosis in evidence.diagnoses)
    return Judgement(
        kind=_kind(verdict, is_wrong=bool(wrong), lost=lost, unnamed=unnamed),
        components=verdict.components,
        cause=verdict.cause,
        lost_updates=lost,
        notes=[*notes, *wrong],
        diagnoses=[diagnosis.to_json() for diagnosis in evidence.diagnoses],
    )


def _kind(verdict: Verdict, *, is_wrong: bool, lost: int, unnamed: bool) -> Kind:
    differing = {name for name, first in verdict.components.items() if first is not None}
    if is_wrong or differing & EXACT or set(verdict.cause) - _DRAWS:
        return Kind.WRONG
    if differing or verdict.cause:
        return Kind.DRIFT
    if unnamed:
        return Kind.NOT_NAMED
    return Kind.LOST_WORK if lost else Kind.SAME


def lost_updates(
    events: Sequence[Mapping[str, Any]],
    damaged: Sequence[Damaged],
    warned_windows: Mapping[int, int],
    abandoned: Mapping[int, int] | None = None,
) -> int:
    """Updates that starts did again although a sound checkpoint held them, or there was warning enough to save them."""
    bad = {one.checkpoint for one in damaged}
    saved, lost = 0, 0
    attempt: int | None = None
    for event in events:
        if event["event"] == "saved" and event["checkpoint"] not in bad:
            windows = int(event["progress"]["windows"])
            if attempt is not None and windows > (abandoned or {}).get(attempt, windows):
                continue  # given up on purpose
            saved = max(saved, int(event["progress"]["updates"]))
        elif event["event"] == "started":
            progress = event["progress"]
            behind = 0 if attempt is None else saved - int(progress["updates"])
            warned = warned_windows.get(attempt) if attempt is not None else None
            late = 0 if warned is None else warned - int(progress["windows"])
            lost += max(0, behind, late)
            saved, attempt = int(progress["updates"]), event["attempt"]
    return lost


def restore_memory(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each start that restored: by how much its fullest rank's memory rose at the most while it did."""
    lines, start = [], None
    for event in events:
        if event["event"] == "started":
            start = event
        elif event["event"] == "memory" and start is not None and start["checkpoint"] and None not in event["ranks"][0]:
            rises = [(after[1] - before[0], before[0]) for before, after in event["ranks"]]
            most, had = max(rises)
            lines.append(
                f"attempt {start['attempt']} on {len(rises)} rank(s): at most {format_bytes(max(0, most))} more memory "
                f"a rank while restoring, above {format_bytes(had)}"
            )
    return lines


def _loaded_damage(evidence: Evidence) -> list[str]:
    bad = {one.checkpoint for one in evidence.damaged}
    starts = [event for event in evidence.events if event["event"] == "started"]
    loaded = [event for event in starts if event["checkpoint"] in bad]
    return [f"attempt {event['attempt']} loaded {event['checkpoint']}, which was damaged" for event in loaded]


def _not_skipped(evidence: Evidence) -> list[str]:
    if evidence.bad_window is None:
        return []
    skipped = [event for event in evidence.events if event["event"] == "skipped"]
    if any(event["window"] == evidence.bad_window for event in skipped):
        return []
    return [f"window {evidence.bad_window} had a non-finite batch and was not skipped"]


def _across_topologies(verdict: Verdict, evidence: Evidence, tolerance: float) -> tuple[Verdict, list[str]]:
    """Ranks come and go: rank 0's edges stand for the run, and only what is alike on all ranks can be compared."""
    shared = _alike_on_all_ranks(evidence.twin)
    of_rank_0 = compare(
        [line for line in evidence.twin if line.rank == 0],
        [line for line in evidence.run if line.rank == 0],
        twin_path=str(evidence.twin_run),
        other_path=str(evidence.run_run),
    )
    components: dict[str, First | None] = {}
    notes = []
    for name, first in of_rank_0.components.items():
        if name in _DRAWS:
            notes.append(f"{name} is derived anew for another number of ranks, and was not compared")
        elif name in EXACT or first is None:
            components[name] = first
        elif first.size is not None and first.size <= tolerance:
            components[name] = None
            notes.append(f"{name} is within {tolerance:g} at the end (largest difference {first.size:.3g})")
        else:
            components[name] = first
    sharded = sorted(set(of_rank_0.components) - shared - _DRAWS)
    if sharded:
        notes.append(
            f"{', '.join(sharded)}: each rank holds another part, so what was restored is proven by the checkpoint's "
            f"own digests and coverage, not compared again here"
        )
    cause = [name for name in verdict.cause if name in shared - _DRAWS]
    return replace(of_rank_0, components=components, cause=cause), notes


def _alike_on_all_ranks(lines: Sequence[Line]) -> set[str]:
    held: dict[tuple[int, str], list[Mapping[str, str]]] = {}
    for line in lines:
        for name, digests in line.held.items():
            held.setdefault((line.window, name), []).append(digests)
    names = {name for _, name in held}
    unlike = {name for (_, name), each in held.items() if any(one != each[0] for one in each)}
    return names - unlike
