"""What a start says to the person who watches: one line what was decided, then why, then what was restored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from samerun.run.starting.start import Started, StartKind

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
