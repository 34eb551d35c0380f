"""Points inside a run, as users write them: `window:13`, `window:13.microbatch:2`, `save:writing`, `save:op:4@20`."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

from samerun.errors import UsageError
from samerun.run.faults import Deed, Fault

_POINT: Final = re.compile(
    r"(?P<point>window:\d+(\.microbatch:\d+|\.step)?|edge:\d+|save:(op:\d+|[a-z]+)|load|evaluate)(@(?P<from>\d+))?"
)
SAVE_POINTS: Final = ("save:staged", "save:writing", "save:shard", "save:index", "save:manifest", "save:committed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinFacts:
    """What the uninterrupted run has shown of itself."""

    num_windows: int
    num_ranks: int
    is_replicated: bool = False
    """Whether DDP holds a copy on every rank."""
    is_sharded: bool = False
    window_seconds: float = 0.0
    is_even: bool = True
    """Whether every rank has as many microbatches in a window."""


def parse_point(text: str, *, rank: int, deed: Deed = Deed.KILL) -> Fault:
    """Raises UsageError for what names no point. `@N` arms it only from window N on."""
    match = _POINT.fullmatch(text)
    point = match["point"] if match else ""
    known = not point.startswith("save:") or point in SAVE_POINTS or point.startswith("save:op:")
    if match is None or not known:
        raise UsageError(
            f"--at {text!r} names no point; write window:13, window:13.microbatch:2, window:13.step, edge:13, load, "
            f"evaluate, save:op:4 or one of {', '.join(SAVE_POINTS)}, each with @N to wait for window N"
        )
    if re.fullmatch(r"window:\d+", point):
        point += ".microbatch:0"
    return Fault(at=point, rank=rank, deed=deed, from_window=int(match["from"] or 0))


def seeded_points(number: int, facts: TwinFacts, *, seed: int) -> list[Fault]:
    """Kills in ascending windows, on any rank: in a forward, before an update, at an edge."""
    draws = random.Random(seed)
    last = max(1, facts.num_windows - 1)
    windows = sorted(draws.randint(min(1, last), last) for _ in range(number))
    return [_one_point(draws, window, draws.randrange(facts.num_ranks)) for window in windows]


def _one_point(draws: random.Random, window: int, rank: int) -> Fault:
    point = draws.choice((f"window:{window}.microbatch:0", f"window:{window}.step", f"edge:{window}"))
    return Fault(at=point, rank=rank, deed=Deed.KILL)


def spread_windows(number: int, facts: TwinFacts) -> list[int]:
    """`number` windows, evenly over the run, none of them the first; UsageError for a run that is too short."""
    if facts.num_windows < number + 1:
        raise UsageError(
            f"the run has {facts.num_windows} windows; this scenario interrupts it {number} times: train for longer"
        )
    return [max(1, (position + 1) * facts.num_windows // (number + 1)) for position in range(number)]
