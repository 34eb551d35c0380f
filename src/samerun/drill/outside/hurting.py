"""Damage on purpose to what a command saved, whatever its format: its newest file of any size."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from samerun.drill.outside.outputs import files_in

_FLIPPED_BIT = 0x10
_NEAR_SECONDS = 1.0
"""Files that changed so close together are one save; the largest of them is the one to damage."""


class Hurt(Enum):
    FLIP = "one bit flipped in the middle"
    CUT = "cut in half"
    REMOVE = "removed"


def hurt_newest(folder: Path, hurt: Hurt, *, but: Sequence[Path] = ()) -> str | None:
    """What was done to which file, for the report; None where there is none to damage. `but`: relative, left alone."""
    stats = [(file, (folder / file).stat()) for file in files_in(folder) if file not in but]
    sized = [(stat.st_mtime, stat.st_size, file) for file, stat in stats if stat.st_size]
    if not sized:
        return None
    newest = max(changed for changed, _, _ in sized)
    _, size, file = max(
        (one for one in sized if newest - one[0] <= _NEAR_SECONDS), key=lambda one: (one[1], str(one[2]))
    )
    path = folder / file
    if hurt is Hurt.REMOVE:
        path.unlink()
    elif hurt is Hurt.CUT:
        with path.open("r+b") as opened:
            opened.truncate(size // 2)
    else:
        with path.open("r+b") as opened:
            opened.seek(size // 2)
            byte = opened.read(1)[0]
            opened.seek(size // 2)
            opened.write(bytes([byte ^ _FLIPPED_BIT]))
    return f"{file} ({size} bytes): {hurt.value}"
