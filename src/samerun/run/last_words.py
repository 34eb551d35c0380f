"""How a process ended on purpose, left where its launcher finds it: torchrun turns every exit code into 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from samerun.core.environ import Launcher
from samerun.errors import ExitCode, Stop

FILE_NAME: Final = "samerun-stop.json"


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
