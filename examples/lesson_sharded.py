"""Four shards, the manifest last, and a reload that is equal byte for byte or says what is wrong.

python examples/lesson_sharded.py

The state of four ranks is saved at step 10 and loaded again. Then the checkpoint is damaged in each way that loaders
of sharded checkpoints meet in practice; each has an error of its own, and none of it is ever loaded.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samerun.errors import CheckpointError
from samerun.lessons import load_sharded, save_sharded

NUM_RANKS, STEP = 4, 10
SHARD = "rank-00002.safetensors"


def state_of(rank: int) -> dict[str, Any]:
    """A quarter of the parameters and of Adam's moments, as sharded training leaves them on a rank."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "params": {"weight": torch.randn(64, 32, generator=generator), "bias": torch.randn(7, generator=generator)},
        "moments": {"exp_avg": torch.randn(64, 32, generator=generator)},
        "rank": rank,
    }


def same_bytes(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return set(ours) == set(theirs) and all(same_bytes(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.numpy().tobytes() == theirs.numpy().tobytes()
    return bool(ours == theirs)


def flip_a_bit(checkpoint: Path) -> None:
    data = bytearray((checkpoint / SHARD).read_bytes())
    data[-100] ^= 1
    (checkpoint / SHARD).write_bytes(data)


def cut(checkpoint: Path) -> None:
    data = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(data[: len(data) // 2])


def another_schema(checkpoint: Path) -> None:
    text = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(text.replace('"schema":"ckpt.v1"', '"schema":"ckpt.v9"'))


FAULTS: dict[str, tuple[Callable[[Path], None], int]] = {
    "another number of ranks": (lambda _: None, 2),
    "a flipped bit": (flip_a_bit, NUM_RANKS),
    "a missing shard": (lambda checkpoint: (checkpoint / SHARD).unlink(), NUM_RANKS),
    "a partial shard": (cut, NUM_RANKS),
    "an unknown schema": (another_schema, NUM_RANKS),
    "no manifest": (lambda checkpoint: (checkpoint / "manifest.json").unlink(), NUM_RANKS),
}
"""Name → (what is done to the checkpoint, how many ranks load it)."""


def refusal(run: Path, fault: str) -> CheckpointError | None:
    """The error that a load after this fault ends with, tried on a copy; None if it was loaded."""
    spoil, num_ranks = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(run, Path(folder) / "copy"))
        spoil(next((copy / "checkpoints").iterdir()))
        try:
            load_sharded(copy, num_ranks)
        except CheckpointError as error:
            return error
    return None


def main() -> None:
    torch.set_num_threads(1)
    states = [state_of(rank) for rank in range(NUM_RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        saved = save_sharded(states, run, STEP)
        checkpoint = run / "checkpoints" / saved.name
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, num_bytes, sha256 in files:
            print(f"{name:23s} {num_bytes:6d} bytes  sha256 {sha256[:16]}…")
        print(f"manifest.json           {len(files)} files of {saved.world_size} ranks at step {STEP}, written last")
        _, loaded = load_sharded(run, NUM_RANKS)
        print(f"reload is byte-equal: {same_bytes(dict(enumerate(loaded)), dict(enumerate(states)))}")
        for fault in FAULTS:
            error = refusal(run, fault)
            said = str(error).replace(f"{Path(folder)}/", "").replace(f"checkpoints/{saved.name}/", "")
            print(f"{fault:24s} {type(error).__name__}: {said[:150]}")


if __name__ == "__main__":
    main()
