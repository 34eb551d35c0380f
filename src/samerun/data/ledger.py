"""One line a window: enough to prove afterwards that every sample of every decided window came exactly once.

Lines are plain JSON for a run's journal. An attempt begins with a line that says from which window it goes on and what
its order is; whatever earlier attempts decided from that window on was lost with them and is superseded. `account`
reads the lines without opening the data: positions must join up, and where the order is known each window's coverage
is worked out anew and compared with what was delivered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from samerun.data.cursor import SCHEMA
from samerun.data.order import ORDER_VERSION, Order
from samerun.data.source import DataWindow
from samerun.data.windows import EpochEnd, Windowing, parse_skip
from samerun.errors import UsageError

BEGAN: Final = "began"


def ledger_line(window: DataWindow, *, decision: str, replicas: int, coverage: int) -> dict[str, Any]:
    """`coverage`: Σ over all replicas of what was delivered, mod 2^64. `decision`: updated, skipped, quarantined, …"""
    return {
        "window": window.index,
        "start": window.start,
        "end": window.end,
        "epoch": window.epoch,
        "microbatches": window.num_microbatches,
        "replicas": replicas,
        "decision": decision,
        "coverage": f"{coverage:016x}",
    }


def began_line(*, attempt: int, window: int, source: dict[str, Any]) -> dict[str, Any]:
    """An attempt goes on at `window`. `source`: what its data says of itself; its whole state where that is short."""
    return {"event": BEGAN, "attempt": attempt, "window": window, "source": source}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What one attempt decided: windows [first, stop), of which those from `kept` on were lost and done again."""

    attempt: int
    first: int
    stop: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A ledger, read."""

    num_windows: int
    """Windows that count, each once."""
    position: int
    """End of the last of them in the global order."""
    decisions: dict[str, int]
    """How many windows were decided which way."""
    num_checked: int
    """Windows whose samples were worked out anew from the order and compared."""
    stretches: tuple[Stretch, ...]
    problems: tuple[str, ...]


def account(lines: Iterable[dict[str, Any]], windowing: Windowing | None = None) -> Account:
    """Reads a run's lines, oldest attempt first. `windowing` is for lines without a `began_line` before them."""
    kept: list[tuple[dict[str, Any], Windowing | None]] = []
    stretches: list[list[int]] = []
    repeated: list[str] = []
    for line in lines:
        if stretches and line.get("event") != BEGAN and line["window"] < stretches[-1][2]:
            repeated.append(f"window {line['window']} was decided twice in attempt {stretches[-1][0]}")
        _supersede(kept, stretches, line["window"])
        if line.get("event") == BEGAN:
            windowing = _windowing_of(line["source"])
            stretches.append([line["attempt"], line["window"], line["window"], line["window"]])
            continue
        kept.append((line, windowing))
        if stretches:
            stretches[-1][2] = stretches[-1][3] = line["window"] + 1
    decisions: dict[str, int] = {}
    for line, _ in kept:
        decisions[line["decision"]] = decisions.get(line["decision"], 0) + 1
    return Account(
        num_windows=len(kept),
        position=kept[-1][0]["end"] if kept else 0,
        decisions=decisions,
        num_checked=sum(order is not None for _, order in kept),
        stretches=tuple(Stretch(attempt=a, first=b, stop=c, kept=d) for a, b, c, d in stretches),
        problems=(*repeated, *_problems(kept)),
    )


def audit(lines: Iterable[dict[str, Any]], windowing: Windowing | None = None) -> list[str]:
    """What is wrong with a ledger, as sentences; empty when every window came once, in order, with the right samples.

    A window that was decided again after a rewind or a crash replaces its earlier line and all lines after that; inside
    one attempt (from one `began_line` to the next) there is neither.
    """
    return list(account(lines, windowing).problems)


def _supersede(kept: list[tuple[dict[str, Any], Windowing | None]], stretches: list[list[int]], window: int) -> None:
    """Whatever was decided from `window` on did not last."""
    while kept and kept[-1][0]["window"] >= window:
        kept.pop()
    for stretch in stretches:
        stretch[3] = min(stretch[3], max(window, stretch[1]))


def _problems(kept: list[tuple[dict[str, Any], Windowing | None]]) -> list[str]:
    problems: list[str] = []
    window, position = 0, 0
    for line, windowing in kept:
        if line["window"] != window:
            problems.append(f"window {line['window']} follows window {window - 1}: some are missing")
        elif line["start"] != position:
            what = "come twice" if line["start"] < position else "are left out"
            problems.append(
                f"window {window} begins at position {line['start']}, the one before ended at {position}: "
                f"positions {min(line['start'], position)} to {max(line['start'], position)} {what}"
            )
        window, position = line["window"] + 1, line["end"]
        if windowing is not None:
            plan = windowing.window(index=line["window"], start=line["start"])
            if plan.end != line["end"] or f"{plan.coverage:016x}" != line["coverage"]:
                problems.append(
                    f"window {line['window']} delivered samples with coverage {line['coverage']}, its positions hold "
                    f"samples with coverage {plan.coverage:016x}"
                )
    return problems


def _windowing_of(state: dict[str, Any]) -> Windowing | None:
    """The order behind a source's own state; None where this version cannot work it out."""
    if state.get("schema") != SCHEMA or state.get("order") != ORDER_VERSION:
        return None
    try:
        return Windowing(
            order=Order(num_samples=state["num_samples"], seed=state["seed"]),
            global_batch=state["global_batch"],
            micro_batch=state["micro_batch"],
            epoch_end=EpochEnd(state["epoch_end"]),
            skip=parse_skip(state["skip"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the ledger holds an order that cannot be read ({error!r}): {state}") from error
