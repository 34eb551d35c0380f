"""What a launcher and its ranks tell each other through the folder of torchrun's error files.

A rank leaves how it ended on purpose, since torchrun turns every exit code into 1; `samerun launch` leaves how long
torchrun waits between SIGTERM and SIGKILL, since torchrun tells its workers nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from samerun.core.environ import Launcher
from samerun.errors import ExitCode, Stop

FILE_NAME: Final = "samerun-stop.json"
LAUNCH_FILE_NAME: Final = "samerun-launch.json"
_DEFAULT_SHUTDOWN_SECONDS: Final = 30.0
"""torchrun's own, shared by all ranks of a node."""


def leave(launcher: Launcher, stop: Stop) -> None:
    """Beside torchrun's own error file; nothing without a launcher."""
    if launcher.error_file is not None:
        folder = Path(launcher.error_file).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(json.dumps({"code": int(stop.exit_code), "reason": stop.reason}))


def read_all(log_dir: Path) -> list[tuple[ExitCode, str]]:
    """(code, reason) of every rank of torchrun's last round that ended on purpose."""
    rounds = sorted(log_dir.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    if not rounds:
        return []
    found = []
    for path in sorted(rounds[-1].glob(f"*/{FILE_NAME}")):
        value = json.loads(path.read_text())
        found.append((ExitCode(value["code"]), str(value["reason"])))
    return found


def announce(log_dir: Path, *, shutdown_seconds: float) -> None:
    """The launcher's word to its ranks."""
    (log_dir / LAUNCH_FILE_NAME).write_text(json.dumps({"shutdown_seconds": shutdown_seconds}))


def launcher_seconds(launcher: Launcher) -> float | None:
    """Seconds between torchrun's SIGTERM and its SIGKILL; None where no launcher stands above this process."""
    if not launcher.supervised:
        return None
    if launcher.error_file is not None and len(parents := Path(launcher.error_file).parents) > 3:
        word = parents[3] / LAUNCH_FILE_NAME
        if word.exists():
            return float(json.loads(word.read_text())["shutdown_seconds"])
    return _DEFAULT_SHUTDOWN_SECONDS
