"""Rewinds against a model that knows one thing: which checkpoint the run goes on from."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samerun.checkpoint import Store, retired
from samerun.checkpoint.catalog import Entry, read_catalog
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import DamagedError, FencedError
from samerun.format.sealed import seal, to_document
from samerun.storage.memory import Memory

KEEP = 2


class Rewinds(RuleBasedStateMachine):
    """The newest attempt saves and rewinds; older ones wake up and try the same."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = Memory()
        self.stores: list[Store] = []
        self.ended: set[int] = set()
        self.newest: str | None = None
        self.windows = 0
        self.num_saves = 0
        self.start()

    @property
    def current(self) -> int:
        return len(self.stores)

    @rule()
    def start(self) -> None:
        store = Store(self.storage, keep_last=KEEP)
        assert store.open_attempt({}) == self.current + 1
        self.stores.append(store)
        retired.announce(self.storage, self.current)
        retired.close_older(self.storage, self.current)
        found = store.catalog().entries
        assert (found[0].name if found else None) == self.newest
        self.windows = int(found[0].progress.windows) if found else 0

    @rule(step=st.integers(0, 7))
    def save(self, step: int) -> None:
        self.windows += step
        name = self._save(self.stores[-1], self.windows)
        if self.current not in self.ended:
            self.newest = name
            catalog = read_catalog(self.storage)
            assert len(catalog.entries) <= KEEP and len(catalog.retired) <= KEEP  # disks stay bounded

    @precondition(lambda self: self.newest is not None and self.current not in self.ended)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(self._entries()))
        for _ in range(2):  # said twice, as after a crash in between
            retired.retire(
                self.storage, attempt=self.current, epoch=self.current, target=target, decision=1, reason="planned"
            )
        self.ended.add(self.current)
        self.newest = target.name

    @precondition(lambda self: self.current > 1 and self.newest is not None)
    @rule(data=st.data(), passed_the_fence=st.booleans())
    def an_older_attempt_wakes_up(self, data: st.DataObject, passed_the_fence: bool) -> None:
        """Also one that had looked for newer attempts in the instant before there was one."""
        zombie = data.draw(st.integers(1, self.current - 1))
        with contextlib.suppress(FencedError):
            self._save(self.stores[zombie - 1], self.windows + 100)
        target = data.draw(st.sampled_from(self._entries()))
        if passed_the_fence:
            record = retired.Retirement(
                schema="ckpt.retired.v1",
                attempt=zombie,
                written_by=zombie,
                target=retired.Target(name=target.name, attempt=target.epoch, windows=0, sequence=0),
                decision=77,
                reason="late",
            )
            with pytest.raises(FencedError):
                retired._put(self.storage, record)
        else:
            with pytest.raises(FencedError):
                retired.retire(
                    self.storage, attempt=zombie, epoch=zombie, target=target, decision=77, reason="late"
                )  # fmt: skip

    @invariant()
    def the_run_goes_on_from_the_newest(self) -> None:
        catalog = read_catalog(self.storage)
        assert (catalog.entries[0].name if catalog.entries else None) == self.newest
        names = [entry.name for entry in catalog.entries] + [one.entry.name for one in catalog.retired]
        assert len(names) == len(set(names))

    def _entries(self) -> list[Entry]:
        return list(read_catalog(self.storage).entries)

    def _save(self, store: Store, windows: int) -> str:
        self.num_saves += 1
        progress = Progress(windows=Windows(windows), updates=Updates(windows))
        return store.save({"loss": Captured(plain=self.num_saves)}, progress, facts={}).result().name


Rewinds.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
test_rewinds_against_a_model = pytest.mark.filterwarnings("default")(Rewinds.TestCase)


def sample() -> tuple[Memory, Store, list[Entry]]:
    storage = Memory()
    store = Store(storage, keep_last=9)
    store.open_attempt({})
    for windows in (1, 2, 3):
        progress = Progress(windows=Windows(windows), updates=Updates(windows))
        store.save({"loss": Captured(plain=windows)}, progress, facts={}).result()
    return storage, store, list(store.catalog().entries)


def test_a_record_that_was_changed_stops_every_reader() -> None:
    storage, _, entries = sample()
    record = retired.retire(storage, attempt=1, epoch=1, target=entries[2], decision=1, reason="planned")
    sound = seal(to_document(record))
    for damaged in (sound[:-1], sound.replace(b"planned", b"plannee"), b""):
        storage.remove("retired/000001.json")
        storage.put_if_absent("retired/000001.json", damaged)
        with pytest.raises(Exception, match=r"retired/000001\.json") as raised:
            read_catalog(storage)
        assert raised.type.__mro__.count(DamagedError) or raised.type.__name__ == "SchemaError"


def test_a_retired_checkpoint_is_none_of_the_proven_ones_that_retention_spares() -> None:
    """All live checkpoints are unproven: then nothing goes, however sound the retired ones are."""
    storage, store, entries = sample()
    retired.retire(storage, attempt=1, epoch=1, target=entries[2], decision=1, reason="planned")
    late = Store(storage, keep_last=1)
    late.open_attempt({})
    late._proven = {entries[0].name, entries[1].name}
    assert late.prune().removed == ()
    late._proven.add(entries[2].name)
    assert late.prune().removed == (entries[1].name,)
    assert late.prune().retired == (entries[0].name,)
    assert [one.name for one in store.catalog().entries] == [entries[2].name]


def test_a_newer_attempt_is_never_covered() -> None:
    _, _, entries = sample()
    record = retired.Retirement(
        schema="ckpt.retired.v1", attempt=1, written_by=1, decision=1, reason="planned",
        target=retired.Target(name=entries[2].name, attempt=1, windows=1, sequence=0),
    )  # fmt: skip
    assert [record.covers(entry) for entry in entries] == [True, True, False]
    assert not record.covers(replace(entries[0], epoch=2))
