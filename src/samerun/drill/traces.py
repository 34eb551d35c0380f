"""Reading what ranks wrote at their edges, and the first place where two runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samerun.core.component import COMPONENTS
from samerun.run.trace import EDGE, RESTORED

_FILES: Final = "attempt-*.rank-*.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rank at one edge (or right after a restore)."""

    kind: str
    attempt: int
    rank: int
    window: int
    update: int
    held: Mapping[str, Mapping[str, str]]
    saved: Mapping[str, Mapping[str, str]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first difference of a component: at which update, on which rank, in which entry, and how large."""

    update: int
    rank: int
    key: str
    size: float | None
    """Absolute difference of a plain number at that edge; for a tensor the largest element's at the end of both runs;
    None where there is no number to subtract."""

    def to_json(self) -> dict[str, Any]:
        return {"update": self.update, "rank": self.rank, "key": self.key, "size": self.size}


def read_traces(folder: Path) -> list[Line]:
    """Every whole line, attempt by attempt; a line cut by a kill is dropped."""
    return [line for path in sorted(folder.glob(_FILES)) for line in _lines(path)]


def updates_done(folder: Path) -> int:
    """How far rank 0 of the newest attempt has come. For progress bars."""
    files = sorted(folder.glob("attempt-*.rank-00000.jsonl"))
    return max((line.update for line in _lines(files[-1])), default=0) if files else 0


def first_differences(twin: list[Line], other: list[Line]) -> dict[str, First | None]:
    """Per component the first edge at which `other` held something else than the twin did; None: never.

    Every line of every attempt is compared, also of windows that were lost and done again. An edge or a component that
    only one of the two has is a difference.
    """
    expected = {(line.window, line.rank): line for line in twin if line.kind == EDGE}
    components = in_order({name for line in (*twin, *other) for name in line.held})
    found: dict[str, First | None] = dict.fromkeys(components)
    for line in sorted((line for line in other if line.kind == EDGE), key=lambda line: (line.window, line.attempt)):
        against = expected.get((line.window, line.rank))
        for name in components:
            if found[name] is None:
                found[name] = _difference(against.held.get(name) if against else None, line.held.get(name), line)
    last = max((line.window for line in twin), default=0)
    reached = {(line.window, line.rank) for line in other if line.kind == EDGE}
    for window, rank in expected:
        if window == last and (window, rank) not in reached:
            missing = First(
                update=expected[window, rank].update, rank=rank, key="(this edge was never reached)", size=None
            )
            found = {name: first or missing for name, first in found.items()}
    return found


def causes(lines: list[Line]) -> list[str]:
    """Components that differed from their checkpoint right after a restore, before any training."""
    wrong = set()
    for line in lines:
        if line.kind == RESTORED and line.saved is not None:
            # a save keeps no digest of a replica on a device that another rank wrote
            wrong |= {
                name for name, saved in line.saved.items() if not saved.items() <= line.held.get(name, {}).items()
            }
    return in_order(wrong)


def in_order(names: Iterable[str]) -> list[str]:
    """Component names as the one list has them, the user's own last."""
    known = {name: position for position, name in enumerate(COMPONENTS)}
    return sorted(names, key=lambda name: (known.get(name, len(known)), name))


def _difference(expected: Mapping[str, str] | None, held: Mapping[str, str] | None, line: Line) -> First | None:
    if expected == held:
        return None
    expected, held = expected or {}, held or {}
    key = next(key for key in sorted(set(expected) | set(held)) if expected.get(key) != held.get(key))
    size = _numeric_size(expected.get(key), held.get(key))
    return First(update=line.update, rank=line.rank, key=key.removesuffix(":"), size=size)


def _numeric_size(one: str | None, other: str | None) -> float | None:
    try:
        return abs(float(one or "") - float(other or ""))
    except ValueError:
        return None


def _lines(path: Path) -> Iterator[Line]:
    attempt, rank = (int(part.rpartition("-")[2]) for part in path.name.removesuffix(".jsonl").split("."))
    for text in path.read_bytes().split(b"\n")[:-1]:
        value = json.loads(text)
        progress = value["progress"]
        yield Line(
            kind=value["kind"],
            attempt=attempt,
            rank=rank,
            window=progress["windows"],
            update=progress["updates"],
            held=value["held"],
            saved=value.get("saved"),
        )
