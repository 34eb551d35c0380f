"""One decided window as one short line: a JSON array whose fields the file's first line names.

At most MAX_LINE_BYTES a window and rank, whatever the values, so a day of 1 s windows stays under 26 MB a rank. Losses,
norms, rates and scales keep 9 significant digits (every float32 exactly); counts are exact; times are whole µs.
A crash or a full disk can cut a line: `read_records` takes whole lines and counts the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = "samerun.windows.v1"
MAX_LINE_BYTES: Final = 300
_MAX_MICROSECONDS: Final = 10**13
"""About 115 days: a time that a clock jump made longer is cut to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """One decided window as one rank saw it. Loss, norm, rate, scale, tokens and outcome are the same on every rank."""

    window: int
    start: int
    """First position of the window in the global sample order; with `end` and the data's seed this is the batch."""
    end: int
    coverage: int
    """64-bit digest of the samples that really arrived, over all ranks."""
    samples: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    scale: float
    outcome: str
    """`updated`, or why not."""
    window_seconds: float
    compute_seconds: float
    """This rank's own work, before the first thing that waits for peers."""
    wait_seconds: float
    """From the last backward to the decision: the last microbatch's gradients, the peers, the optimizer's step."""
    data_seconds: float
    memory_bytes: int

    def to_line(self) -> bytes:
        """The record as one line, newline included, at most MAX_LINE_BYTES."""
        return (
            json.dumps([_written(name, getattr(self, name)) for name in FIELDS], separators=(",", ":")).encode() + b"\n"
        )

    @classmethod
    def from_values(cls, values: list[Any]) -> WindowRecord:
        """Raises ValueError for anything that `to_line` does not write."""
        if len(values) != len(FIELDS):
            raise ValueError(f"a window record has {len(FIELDS)} fields, found {len(values)}")
        return cls(**{name: _read(name, value) for name, value in zip(FIELDS, values, strict=True)})


FIELDS: Final = tuple(field.name for field in fields(WindowRecord))
_SECONDS: Final = frozenset(name for name in FIELDS if name.endswith("_seconds"))
_NUMBERS: Final = frozenset({"loss", "grad_norm", "lr", "scale"})
_COUNTS: Final = frozenset({"window", "start", "end", "coverage", "samples", "tokens", "memory_bytes"})


def header_line(*, rank: int, attempt: int, facts: Mapping[str, Any]) -> bytes:
    """The first line of a file of records: its schema, the names of the fields, and whose records they are."""
    head = {"schema": SCHEMA, "fields": list(FIELDS), "rank": rank, "attempt": attempt, **facts}
    return json.dumps(head, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a file of records held."""

    head: Mapping[str, Any]
    records: tuple[WindowRecord, ...]
    num_unreadable: int
    """Lines that were cut or damaged."""


def read_records(path: Path) -> Recorded:
    """Every whole record of one rank's file. Raises ValueError when the file does not begin as one."""
    return parse_records(path.read_bytes(), str(path))


def parse_records(data: bytes, where: str) -> Recorded:
    """The same from a file's bytes; `where` is named in errors."""
    first, *lines = data.split(b"\n")
    head = json.loads(first) if first.startswith(b"{") else {}
    if head.get("schema") != SCHEMA or head.get("fields") != list(FIELDS):
        raise ValueError(f"{where}: not a file of {SCHEMA} records")
    records, num_unreadable = [], 0
    for line in filter(None, lines):
        try:
            records.append(WindowRecord.from_values(json.loads(line)))
        except (ValueError, TypeError):
            num_unreadable += 1
    return Recorded(head=head, records=tuple(records), num_unreadable=num_unreadable)


def _written(name: str, value: float | str) -> Any:
    if name in _SECONDS:
        return min(_MAX_MICROSECONDS, max(0, round(float(value) * 1e6)))
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    return value


def _read(name: str, value: Any) -> Any:
    if name in _NUMBERS and (type(value) in (int, float) or value in ("nan", "inf", "-inf")):
        return float(value)
    if name in _SECONDS and type(value) is int and value >= 0:
        return value / 1e6
    if name in _COUNTS and type(value) is int and value >= 0:
        return value
    if name == "outcome" and isinstance(value, str):
        return value
    raise ValueError(f"the field {name} of a window record cannot be {value!r}")
