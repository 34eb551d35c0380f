"""What a launcher and its ranks tell each other through the folder of torchrun's error files.

A rank leaves how it ended on purpose, since torchrun turns every exit code into 1; `samerun launch` leaves how long
torchrun waits between SIGTERM and SIGKILL, since torchrun tells its workers nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samerun.core.environ import Launcher
from samerun.errors import ExitCode, Stop

FILE_NAME: Final = "samerun-stop.json"
RUN_FILE_NAME: Final = "samerun-run.json"
LAUNCH_FILE_NAME: Final = "samerun-launch.json"
_DEFAULT_SHUTDOWN_SECONDS: Final = 30.0
"""torchrun's own, shared by all ranks of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """How one rank ended."""

    rank: int
    """Of all nodes: torchrun speaks of failures by that number, its folders are named by the node's own."""
    code: ExitCode
    reason: str
    window: int | None
    batch: str | None = None
    """Which samples the open window held: what to look at first when a failure comes back."""


def leave(launcher: Launcher, stop: Stop) -> None:
    """Beside torchrun's own error file; nothing without a launcher."""
    _write(launcher, {"code": int(stop.exit_code), "reason": stop.reason, "window": None, "batch": None})


def read_all(log_dir: Path) -> list[Word]:
    """What every rank of torchrun's last round left, in rank order; a rank that was killed left nothing."""
    rounds = sorted(log_dir.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    if not rounds:
        return []
    found = []
    for path in sorted(rounds[-1].glob(f"*/{FILE_NAME}")):
        value = json.loads(path.read_text())
        word = Word(
            rank=int(value["rank"]),
            code=ExitCode(value["code"]),
            reason=str(value["reason"]),
            window=value["window"],
            batch=value["batch"],
        )
        found.append(word)
    return sorted(found, key=lambda word: word.rank)


def confess(launcher: Launcher, error: Exception, *, window: int | None, batch: str | None) -> None:
    """An error that nobody planned: what the launcher's ledger tells failures apart by."""
    reason = f"{type(error).__name__}: {error}"
    _write(launcher, {"code": int(ExitCode.FAILED), "reason": reason, "window": window, "batch": batch})


def introduce(launcher: Launcher, path: str) -> None:
    """Where the run lives, for the launcher's ledger."""
    root = _log_dir(launcher)
    if root is not None:
        (root / RUN_FILE_NAME).write_text(json.dumps({"path": path}))


def run_path(log_dir: Path) -> str | None:
    """The run that the ranks introduced; None for a script that opened none."""
    word = log_dir / RUN_FILE_NAME
    return str(json.loads(word.read_text())["path"]) if word.exists() else None


def announce(log_dir: Path, *, shutdown_seconds: float) -> None:
    """The launcher's word to its ranks."""
    (log_dir / LAUNCH_FILE_NAME).write_text(json.dumps({"shutdown_seconds": shutdown_seconds}))


def launcher_seconds(launcher: Launcher) -> float | None:
    """Seconds between torchrun's SIGTERM and its SIGKILL; None where no launcher stands above this process."""
    if not launcher.supervised:
        return None
    root = _log_dir(launcher)
    if root is not None and (root / LAUNCH_FILE_NAME).exists():
        return float(json.loads((root / LAUNCH_FILE_NAME).read_text())["shutdown_seconds"])
    return _DEFAULT_SHUTDOWN_SECONDS


def _write(launcher: Launcher, value: dict[str, Any]) -> None:
    if launcher.error_file is not None:
        folder = Path(launcher.error_file).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(json.dumps({"rank": launcher.rank or 0, **value}))


def _log_dir(launcher: Launcher) -> Path | None:
    """torchrun's log folder: its error files lie in RUN_ID/attempt_N/RANK/ below it."""
    if launcher.error_file is None:
        return None
    parents = Path(launcher.error_file).parents
    return parents[3] if len(parents) > 3 else None
