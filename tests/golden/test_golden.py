"""Directories written by earlier versions still load, and what is wrong with the damaged ones is still said.

They are committed: a change of a single byte of what is written today shows here before any user sees it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from golden.make_golden import BY_ONE, BY_TWO, DAMAGES, HERE, MATRIX, PLAIN, state, write_sound
from samerun.checkpoint import Store
from samerun.checkpoint.catalog import Entry
from samerun.checkpoint.verify import verify_checkpoint
from samerun.core.component import Captured
from samerun.errors import CheckpointError
from samerun.storage.local import Local


class As:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def load(path: Path, entry: Entry, rank: int, size: int) -> None:
    with Store(path, group=As(rank, size)).open(entry) as checkpoint:
        for name, captured in state(0, 1).items():
            source = checkpoint.source(name)
            for key, spec in source.specs.items():
                target = torch.zeros(spec.shape, dtype=spec.dtype)
                source.read_into(key, target)
                assert torch.equal(target, _expected(captured, key, rank)), (name, key)
        assert repr(checkpoint.source("scheduler").plain) == repr(PLAIN)
        assert checkpoint.source("rng").plain == {"rank": rank}
        assert checkpoint.unconsumed() == []
        assert checkpoint.digests["weights"] == {"scalar": "x0"}


def _expected(captured: Captured, key: str, rank: int) -> torch.Tensor:
    if key == "sharded":
        return MATRIX
    if key == "torch":
        return torch.full((5,), rank, dtype=torch.uint8)
    return captured.tensors[key]


def test_the_sound_run_loads_as_it_was_saved() -> None:
    store = Store(HERE / "sound")
    newest, older = store.catalog().entries
    assert (newest.name, older.name) == (BY_TWO, BY_ONE)
    assert (newest.epoch, older.epoch, newest.facts) == (2, 1, {"size": 2})
    for rank in range(2):
        load(HERE / "sound", newest, rank, 2)
    load(HERE / "sound", older, 0, 1)
    assert store.read_run() == {"id": "golden"}
    assert store.newest_attempt() == 2
    for name in (BY_ONE, BY_TWO):
        assert verify_checkpoint(Local(HERE / "sound"), name).problems == ()


def test_today_writes_the_same_bytes(tmp_path: Path) -> None:
    write_sound(tmp_path)
    today = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    sound = HERE / "sound"
    golden = {str(p.relative_to(sound)): p.read_bytes() for p in sound.rglob("*") if p.is_file()}
    assert sorted(today) == sorted(golden)
    for name, data in golden.items():
        assert today[name] == data, f"{name} is written differently now: bump the schema and keep this directory"


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named_and_the_older_checkpoint_loads(name: str) -> None:
    path = HERE / "damaged" / name
    catalog = Store(path).catalog()
    reason = next((rejected.reason for rejected in catalog.rejected if rejected.name == BY_TWO), None)
    if reason is None:
        with pytest.raises(CheckpointError) as caught:
            for rank in range(2):
                load(path, catalog.entries[0], rank, 2)
        reason = str(caught.value)
    assert DAMAGES[name][1] in reason
    assert BY_TWO in reason
    assert verify_checkpoint(Local(path), BY_TWO).problems
    assert catalog.entries[-1].name == BY_ONE
    load(path, catalog.entries[-1], 0, 1)


def test_every_damaged_directory_is_tested() -> None:
    assert {path.name for path in (HERE / "damaged").iterdir()} == set(DAMAGES)
