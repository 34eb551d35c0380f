"""Writes the golden directories: `python tests/golden/make_golden.py` after a deliberate change of the format.

`ckpt.v1/sound`: one run, saved once by one rank and once by two (sharded and replicated tensors, per-rank state).
`ckpt.v1/damaged/NAME`: the same run with one thing wrong, which NAME says.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from samerun.checkpoint import Slices, Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Samples, Tokens, Updates, Windows
from samerun.format.layout import Box
from samerun.ranks.group import Group
from samerun.ranks.threads import run_ranks

HERE = Path(__file__).parent / "ckpt.v1"
BY_ONE, BY_TWO = "u000000001-00000001", "u000000002-00000002"

MATRIX = torch.arange(35, dtype=torch.float32).reshape(7, 5) / 8
PLAIN = {
    "b": 1, "a": [True, None, -0.0, 0.1, 1e300, 2**70], 3: (1, "ä\n", b"\x00\xff"),
    "$odd": float("inf"), "-inf": float("-inf"), "nan": float("nan"), "milestones": Counter({30: 1, 60: 2}), "": {},
}  # fmt: skip


def state(rank: int, size: int) -> dict[str, Captured]:
    rows = [(0, 7)] if size == 1 else [(0, 4), (4, 3)]
    start, length = rows[rank]
    part = Slices(dtype=torch.float32, shape=(7, 5), parts={Box((start, 0), (length, 5)): MATRIX[start:][:length]})
    return {
        "weights": Captured(
            tensors={
                "sharded": part,  # type: ignore[dict-item]
                "bf16": torch.tensor([1.0, -2.5, float("inf")], dtype=torch.bfloat16),
                "complex": torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128),
                "empty": torch.zeros(3, 0),
                "scalar": torch.tensor(7),
                "flags": torch.tensor([True, False, True]),
            }
        ),
        "scheduler": Captured(plain=PLAIN),
        "rng": Captured(plain={"rank": rank}, rank_tensors={"torch": torch.full((5,), rank, dtype=torch.uint8)}),
    }


def write_sound(path: Path) -> None:
    for size, name in ((1, BY_ONE), (2, BY_TWO)):
        with mock.patch("samerun.checkpoint.save.commit.names.checkpoint_name", lambda updates, name=name: name):
            run_ranks(size, partial(_save, path, size))


def _save(path: Path, size: int, group: Group) -> None:
    progress = Progress(
        windows=Windows(size + 1), updates=Updates(size), samples=Samples(13 * size), tokens=Tokens(2**40)
    )
    store = Store(path, group=group)
    store.write_run({"id": "golden"})
    store.open_attempt({"host": "golden"})
    digests = {"weights": {"scalar": "x0"}}
    tags = ["best"] if size == 1 else []
    store.save(state(group.rank, size), progress, facts={"size": size}, tags=tags, digests=digests).result()


Damage = Callable[[Path], None]


def _edit(file: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(run: Path) -> None:
        path = run / "checkpoints" / BY_TWO / file
        path.write_bytes(change(path.read_bytes()))

    return damage


def _swap_ranks(run: Path) -> None:
    first, second = (run / "checkpoints" / BY_TWO / f"rank-0000{n}.safetensors" for n in (0, 1))
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def _from_the_other(run: Path) -> None:
    shutil.copy(run / "checkpoints" / BY_ONE / "manifest.json", run / "checkpoints" / BY_TWO / "manifest.json")


def _remove(file: str) -> Damage:
    return lambda run: (run / "checkpoints" / BY_TWO / file).unlink()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no-manifest": (_remove("manifest.json"), "no manifest"),
    "missing-shard": (_remove("rank-00001.safetensors"), "rank-00001.safetensors: missing"),
    "missing-index": (_remove("rank-00000.json"), "rank-00000.json: missing"),
    "cut-shard": (_edit("rank-00000.safetensors", lambda data: data[:-1]), "bytes, the manifest says"),
    "empty-index": (_edit("rank-00000.json", lambda data: b""), "0 bytes, the manifest says"),
    "flipped-byte-in-shard": (
        _edit("rank-00000.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        "have digest",
    ),
    "flipped-byte-in-index": (_edit("rank-00001.json", lambda data: data.replace(b'rank":1', b'rank":0')), "SHA-256"),
    "edited-manifest": (_edit("manifest.json", lambda data: data.replace(b'skipped":0', b'skipped":1')), "claims"),
    "pretty-printed-manifest": (_edit("manifest.json", lambda data: data.replace(b",", b", ")), "canonical"),
    "newer-schema": (_edit("manifest.json", lambda data: data.replace(b'"ckpt.v1"', b'"ckpt.v9"')), "'ckpt.v9'"),
    "shards-swapped-between-ranks": (_swap_ranks, "bytes, the manifest says"),
    "manifest-of-another-checkpoint": (_from_the_other, "copied here"),
}


def write_all(path: Path) -> None:
    write_sound(path / "sound")
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(path / "sound", path / "damaged" / name)
        damage(path / "damaged" / name)


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    write_all(HERE)
    sys.stdout.write(f"wrote {HERE}\n")
