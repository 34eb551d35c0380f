"""From a scenario's name and what the twin has shown to the chapters of the run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from samerun.drill.damage import Damage
from samerun.drill.inside.chapters import LAST, Chapter
from samerun.drill.inside.diagnosis import REPORT_WINDOWS, SPIKE_WINDOW, checksum_windows, strikes
from samerun.drill.inside.points import TwinFacts, parse_point, seeded_points, spread_windows
from samerun.drill.processes import Blow
from samerun.errors import UsageError
from samerun.run.faults import Deed, Fault

MAX_OPERATIONS: Final = 400
"""A save with more file operations than this is drilled up to here."""
BAD_WINDOW: Final = 1
_STALL_SECONDS: Final = 0.5
_SLOW_SECONDS: Final = 0.01
_FULL_DISK_AT: Final = 3
_WAYS_TO_STOP: Final = 6


class Scenario(Enum):
    CONTINUITY = "continuity"
    CRASH = "crash"
    PREEMPT = "preempt"
    TOPOLOGY = "topology"
    DAMAGE = "damage"
    FAULTS = "faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user said about the interruptions."""

    points: Sequence[str] = ()
    num_kills: int = 2
    seed: int = 0
    rank: int = 0
    sizes: Sequence[int] = (1,)
    """Numbers of ranks, start by start."""


def chapters(scenario: Scenario, wish: Wish, facts: TwinFacts) -> list[Chapter]:
    """UsageError where the run is too short for the scenario, or a rank or point does not exist."""
    if wish.rank >= facts.num_ranks:
        raise UsageError(f"--rank {wish.rank}: the command runs on {facts.num_ranks} rank(s), counted from 0")
    return [*_CHAPTERS[scenario](wish, facts), _last(scenario, wish)]


def standing_faults(scenario: Scenario, wish: Wish) -> tuple[Fault, ...]:
    """Faults that belong to the training itself, in every start and in the twin: a bad batch is there for both."""
    if scenario is not Scenario.FAULTS:
        return ()
    return (
        Fault(at=f"window:{BAD_WINDOW}.microbatch:0", rank=wish.rank, deed=Deed.NON_FINITE),
        Fault(at=f"window:{SPIKE_WINDOW}.microbatch:0", rank=wish.rank, deed=Deed.POISON),
    )


def health_of(scenario: Scenario, facts: TwinFacts | None) -> dict[str, Any]:
    """What the run is to watch: in the twin (no facts yet) as much as later, but it does nothing about it."""
    if scenario is not Scenario.FAULTS:
        return {}
    if facts is None:
        return {"mode": "observe"}
    return {"mode": "act", "report_windows": REPORT_WINDOWS, "checksum_windows": checksum_windows(facts)}


def _last(scenario: Scenario, wish: Wish) -> Chapter:
    if scenario is Scenario.TOPOLOGY:
        return Chapter(title=f"to the end on {wish.sizes[-1]} rank(s)", is_last=True, nproc=wish.sizes[-1])
    return LAST


def _continuity(wish: Wish, facts: TwinFacts) -> list[Chapter]:
    faults = [parse_point(point, rank=wish.rank) for point in wish.points]
    missing = wish.num_kills - len(faults)
    if not faults:
        faults = seeded_points(wish.num_kills, facts, seed=wish.seed)
    elif missing > 0:  # one resume proves little: the second one finds what the first one broke
        faults += faults[-1:] * missing
    return [Chapter(title=f"SIGKILL of rank {fault.rank} at {fault.at}", faults=(fault,)) for fault in faults]


def _crash(wish: Wish, facts: TwinFacts) -> list[Chapter]:
    return [
        Chapter(
            title=f"SIGKILL of rank {wish.rank} before file operation {number} of a save",
            faults=(Fault(at=f"save:op:{number}", rank=wish.rank, deed=Deed.KILL, from_window=1),),
            until_it_fails_to_come=True,
        )
        for number in range(MAX_OPERATIONS)
    ]


def _preempt(wish: Wish, facts: TwinFacts) -> list[Chapter]:
    windows = iter(spread_windows(_WAYS_TO_STOP, facts))

    def at_next(deed: Deed, rank: int) -> tuple[Fault, ...]:
        return (Fault(at=f"window:{next(windows)}.microbatch:0", rank=rank, deed=deed),)

    last_rank = facts.num_ranks - 1
    ways = [
        Chapter(title=f"SIGTERM to rank {last_rank} alone", faults=at_next(Deed.TERM, last_rank), had_warning=True),
        Chapter(title="SIGTERM to the command's process group", faults=at_next(Deed.MARK, 0), blow=Blow.TERM),
        Chapter(title="SIGTERM, and SIGKILL at once", faults=at_next(Deed.MARK, 0), blow=Blow.TERM_THEN_KILL),
        Chapter(title="SIGKILL of everything", faults=at_next(Deed.MARK, 0), blow=Blow.KILL),
    ]
    if facts.num_ranks > 1:  # a single process may have this drill as its parent
        alone = at_next(Deed.KILL_LAUNCHER, 0)
        ways.append(Chapter(title="SIGKILL of the launcher alone", faults=alone, orphans_stop=True))
    in_save = Fault(at="save:writing", rank=0, deed=Deed.KILL, from_window=next(windows))
    return [*ways, Chapter(title="SIGKILL of rank 0 inside a save", faults=(in_save,))]


def _topology(wish: Wish, facts: TwinFacts) -> list[Chapter]:
    if len(wish.sizes) < 2:
        raise UsageError("topology needs at least two numbers of ranks and {nproc} in the command: --nproc 4,2,1")
    windows = spread_windows(len(wish.sizes) - 1, facts)
    return [
        Chapter(
            title=f"SIGKILL on {size} rank(s) in window {window}",
            faults=(Fault(at=f"window:{window}.step", rank=size - 1, deed=Deed.KILL),),
            nproc=size,
        )
        for size, window in zip(wish.sizes[:-1], windows, strict=True)
    ]


def _damage(wish: Wish, facts: TwinFacts) -> list[Chapter]:
    """Each start is killed right after it has published a checkpoint, which is then damaged."""
    published = Fault(at="save:committed", rank=0, deed=Deed.KILL, from_window=1)
    first = Chapter(title="SIGKILL after a checkpoint was published", faults=(published,))
    return [first, *(Chapter(title=kind.value, faults=(published,), damage=kind) for kind in Damage)]


def _faults(wish: Wish, facts: TwinFacts) -> list[Chapter]:
    stall_at, slow_at, full_at, end_at = spread_windows(4, facts)
    stall = Fault(
        at=f"window:{stall_at}.microbatch:0", rank=facts.num_ranks - 1, deed=Deed.STALL, seconds=_STALL_SECONDS
    )
    slow = Fault(at="save:op:0", rank=0, deed=Deed.SLOW_DISK, from_window=1, seconds=_SLOW_SECONDS)
    full = Fault(at=f"save:op:{_FULL_DISK_AT}", rank=0, deed=Deed.FULL_DISK, from_window=full_at)
    kill = Fault(at=f"window:{slow_at}.step", rank=0, deed=Deed.KILL)
    struck = Chapter(title="a slow rank, a flipped bit in one replica", faults=strikes(facts))
    return [
        *([struck] if struck.faults else []),
        Chapter(title="a straggling rank, SIGKILL", faults=(stall, kill)),
        Chapter(title="the disk is full", faults=(full,)),
        Chapter(
            title="slow storage, SIGKILL",
            faults=(slow, Fault(at=f"window:{end_at}.step", rank=0, deed=Deed.KILL)),
        ),
    ]


_CHAPTERS: Final[dict[Scenario, Callable[[Wish, TwinFacts], list[Chapter]]]] = {
    Scenario.CONTINUITY: _continuity,
    Scenario.CRASH: _crash,
    Scenario.PREEMPT: _preempt,
    Scenario.TOPOLOGY: _topology,
    Scenario.DAMAGE: _damage,
    Scenario.FAULTS: _faults,
}
