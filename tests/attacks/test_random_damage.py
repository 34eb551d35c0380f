"""Invariant 4: of thousands of randomly damaged checkpoints, none loads and none stops the fall-back to the other."""

from __future__ import annotations

import pytest

from attacks.mutations import damaged
from attacks.sample_run import copy_of, load, sample
from samerun.checkpoint import Store
from samerun.checkpoint.verify import verify_checkpoint
from samerun.errors import CheckpointError, StorageError
from samerun.storage.memory import Memory


def storm(first: int, count: int) -> tuple[int, int]:
    """(mutations that changed something, of those: silent loads). Every error must be a typed one that names a file."""
    base = sample()
    newest = Store(base).catalog().entries[0]
    keys = sorted(key for key in base.objects if key.startswith(f"checkpoints/{newest.name}/"))
    others = [base.objects[key] for key in sorted(base.objects)]
    changed, silent = 0, []
    for seed in range(first, first + count):
        key = keys[seed % len(keys)]
        data = damaged(base.objects[key], seed, others)
        if data == base.objects[key]:
            continue
        changed += 1
        storage = Memory()
        storage.objects = dict(base.objects)
        storage._versions = dict.fromkeys(base.objects, 1)
        if data is None:
            del storage.objects[key]
        else:
            storage.objects[key] = data
        try:
            _load_newest(storage, newest.name)
        except (CheckpointError, StorageError) as error:
            assert newest.name in str(error) or key in str(error), (seed, str(error))
        else:
            silent.append(seed)
        if seed % 50 == 0:
            assert verify_checkpoint(storage, newest.name).problems, seed
            entries = [entry for entry in Store(storage).catalog().entries if entry.name != newest.name]
            assert len(entries) == 1
            load(storage, entries[0])
    assert silent == []
    return changed, len(silent)


def _load_newest(storage: Memory, name: str) -> None:
    catalog = Store(storage).catalog()
    for entry in catalog.entries:
        if entry.name == name:
            load(storage, entry)
            return
    reasons = [rejected.reason for rejected in catalog.rejected if rejected.name == name]
    assert len(reasons) == 1
    raise CheckpointError(f"{name}: {reasons[0]}")


def test_five_thousand_damaged_checkpoints_and_no_silent_load() -> None:
    changed, silent = storm(0, 5_000)
    assert changed > 4_500
    assert silent == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_damaged_checkpoints_and_no_silent_load() -> None:
    changed, silent = storm(1_000_000, 105_000)
    assert changed > 100_000
    assert silent == 0


def test_the_storm_sees_a_reader_that_does_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samerun.format.blocks.xxhash.xxh3_128_hexdigest", _Anything)
    with pytest.raises(AssertionError, match="SILENT"):
        storm(0, 400)


class _Anything(str):
    """A digest that equals every digest."""

    def __new__(cls, data: object) -> _Anything:
        return super().__new__(cls, "0" * 32)

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def test_the_sample_itself_loads() -> None:
    storage = copy_of(sample())
    for entry in Store(storage).catalog().entries:
        load(storage, entry)
        assert verify_checkpoint(storage, entry.name).problems == ()
