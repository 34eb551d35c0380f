"""`samerun show RUN --samples`: the run's ledger of samples, audited over all attempts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import typer

from samerun.cli.checkpoints.target import answer
from samerun.data.ledger import Account, Stretch, account
from samerun.errors import DamagedError, ExitCode, UsageError
from samerun.storage.journal import SAMPLES, read_journal

if TYPE_CHECKING:
    from samerun.storage.api import Storage

_MAX_FILE_BYTES: Final = 2**30
"""About four million windows of one attempt."""
_MAX_TOLD: Final = 20


def show_samples(storage: Storage, name: str, *, as_json: bool) -> None:
    """Answers, and exits with 3 when something is wrong.

    Raises UsageError for the name of a checkpoint, DamagedError for lines that cannot be read.
    """
    if name:
        raise UsageError(f"--samples is about the whole run: leave out @{name}")
    try:
        found = account(read_journal(storage, suffix=SAMPLES, max_bytes=_MAX_FILE_BYTES))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{storage.where}: a line of the ledger of samples cannot be read ({error!r})") from error
    document = {
        "schema": "samerun.samples.v1",
        "run": storage.where,
        "verdict": _verdict(found),
        **asdict(found),
    }
    answer(document, _lines(found), as_json=as_json)
    if found.problems:
        raise typer.Exit(int(ExitCode.NEGATIVE))


def _verdict(found: Account) -> str:
    if found.problems:
        return "unsound"
    return "sound" if found.num_windows and found.num_checked == found.num_windows else "cannot tell"


def _lines(found: Account) -> list[str]:
    if not found.num_windows:
        return ["cannot tell: no window was written down"]
    decided = ", ".join(f"{count} {decision}" for decision, count in found.decisions.items())
    lines = [_stretch(stretch) for stretch in found.stretches]
    lines.append(f"windows    0 to {found.num_windows - 1}: {decided}; positions 0 to {found.position}")
    lines += [f"problem    {problem}" for problem in found.problems[:_MAX_TOLD]]
    if len(found.problems) > _MAX_TOLD:
        lines.append(f"           and {len(found.problems) - _MAX_TOLD} more; --json lists all")
    lines.append(f"{_verdict(found)}: {_why(found)}")
    return lines


def _stretch(stretch: Stretch) -> str:
    what = f"windows {stretch.first} to {stretch.stop - 1}" if stretch.stop > stretch.first else "no window"
    lost = f"; {stretch.stop - stretch.kept} of them were lost with it" if stretch.stop > stretch.kept else ""
    return f"attempt {stretch.attempt:<3}{what}{lost}"


def _why(found: Account) -> str:
    if found.problems:
        return f"{len(found.problems)} problems in {found.num_windows} windows"
    if found.num_checked < found.num_windows:
        unknown = found.num_windows - found.num_checked
        return f"positions join up, but the order of {unknown} windows is the source's own and was not worked out"
    return "each position once, in order, and every window held the samples of its positions"
