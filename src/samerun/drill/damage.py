"""Damage on purpose to the newest checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from samerun.checkpoint import Store
from samerun.errors import UsageError
from samerun.format.names import CHECKPOINTS, MANIFEST


class Damage(Enum):
    FLIP_TENSORS = "one bit flipped in the largest tensor file"
    CUT_TENSORS = "the largest tensor file cut in half"
    REMOVE_INDEX = "an index removed"
    FLIP_MANIFEST = "one bit flipped in the manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    checkpoint: str
    what: str


def damage_newest(run: Path, damage: Damage) -> Damaged:
    """Raises UsageError when there is no checkpoint to damage."""
    entries = Store(run).catalog().entries
    if not entries:
        raise UsageError(f"{run} has no checkpoint that could be damaged")
    folder = run / CHECKPOINTS / entries[0].name
    what = _DOING[damage](folder)
    return Damaged(checkpoint=folder.name, what=what)


def flip_one_byte_of_newest(run: Path) -> str:
    """Flips one bit in the middle of the largest tensor file; returns what was done, for the report."""
    return damage_newest(run, Damage.FLIP_TENSORS).what


def _flip_tensors(folder: Path) -> str:
    return _flip(_largest(folder))


def _flip_manifest(folder: Path) -> str:
    return _flip(folder / MANIFEST)


def _flip(file: Path) -> str:
    position = file.stat().st_size // 2
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 0x10]))
    return f"one bit flipped at byte {position} of {file.parent.name}/{file.name}"


def _cut_tensors(folder: Path) -> str:
    file = _largest(folder)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size // 2)
    return f"{folder.name}/{file.name} cut from {size} to {size // 2} bytes"


def _remove_index(folder: Path) -> str:
    file = sorted(folder.glob("rank-*.json"))[-1]
    file.unlink()
    return f"{folder.name}/{file.name} removed"


def _largest(folder: Path) -> Path:
    """The largest file of tensors, or of anything where a run has no tensors."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("rank-*.json"))
    return max(files, key=lambda file: file.stat().st_size)


_DOING: Final[dict[Damage, Callable[[Path], str]]] = {
    Damage.FLIP_TENSORS: _flip_tensors,
    Damage.CUT_TENSORS: _cut_tensors,
    Damage.REMOVE_INDEX: _remove_index,
    Damage.FLIP_MANIFEST: _flip_manifest,
}
