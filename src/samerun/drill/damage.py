"""Damage on purpose to the newest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from samerun.checkpoint import Store


def flip_one_byte_of_newest(run: Path) -> str:
    """Flips one bit in the middle of rank 0's tensors; returns what was done, for the report."""
    newest = Store(run).catalog().entries[0]
    file = run / "checkpoints" / newest.name / "rank-00000.safetensors"
    position = file.stat().st_size // 2
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 0x10]))
    return f"one bit flipped at byte {position} of {newest.name}/{file.name}"
