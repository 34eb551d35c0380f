"""Files that changed in the working directory while a command ran: what it wrote outside the folder it was given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MAX_FILES: Final = 20_000
_SKIPPED: Final = frozenset({"__pycache__", "venv", "node_modules"})
"""Beside hidden folders: caches and environments."""

Snapshot = dict[str, tuple[int, int]]


def snapshot(folder: Path, *, but: Sequence[Path]) -> Snapshot | None:
    """Path → (size, change time) of every file; None where there are too many to look at."""
    excluded = {str(path.resolve()) for path in but}
    found: Snapshot = {}
    for root, folders, names in os.walk(folder.resolve()):
        folders[:] = [name for name in folders if _is_looked_at(name) and str(Path(root, name)) not in excluded]
        for name in names:
            path = Path(root, name)
            try:
                stat = path.lstat()
            except FileNotFoundError:
                continue
            found[str(path)] = (stat.st_size, stat.st_mtime_ns)
        if len(found) > MAX_FILES:
            return None
    return found


def _is_looked_at(name: str) -> bool:
    return name not in _SKIPPED and not name.startswith(".")


def strays(before: Snapshot | None, after: Snapshot | None) -> list[str]:
    """Files that are new or have changed, sorted."""
    if before is None or after is None:
        return []
    return sorted(path for path, state in after.items() if before.get(path) != state)
