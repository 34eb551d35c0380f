"""One line a window: enough to prove afterwards that every sample of every decided window came exactly once.

Lines are plain JSON for a run's journal. `audit` reads them without opening the data: positions must join up, and where
the order is known, each window's coverage is worked out anew and compared with what was delivered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from samerun.data.source import DataWindow
from samerun.data.windows import Windowing


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


def audit(lines: Iterable[dict[str, Any]], windowing: Windowing | None = None) -> list[str]:
    """What is wrong with a ledger, as sentences; empty when every window came once, in order, with the right samples.

    A window that was decided again after a rewind or a crash replaces its earlier line and all lines after that.
    """
    kept: list[dict[str, Any]] = []
    for line in lines:
        while kept and kept[-1]["window"] >= line["window"]:
            kept.pop()
        kept.append(line)
    problems: list[str] = []
    window, position = 0, 0
    for line in kept:
        if line["window"] != window:
            problems.append(f"window {line['window']} follows window {window - 1}: some are missing")
        elif line["start"] != position:
            problems.append(f"window {window} begins at position {line['start']}, the one before ended at {position}")
        window, position = line["window"] + 1, line["end"]
        if windowing is not None:
            plan = windowing.window(index=line["window"], start=line["start"])
            if plan.end != line["end"] or f"{plan.coverage:016x}" != line["coverage"]:
                problems.append(
                    f"window {line['window']} delivered samples with coverage {line['coverage']}, its positions hold "
                    f"samples with coverage {plan.coverage:016x}"
                )
    return problems
