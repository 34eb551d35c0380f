"""Invariant 5 for any policies, any list and any knowledge: what must stay, stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samerun.checkpoint import Store
from samerun.checkpoint.catalog import Entry
from samerun.checkpoint.prune import plan_pruning
from samerun.checkpoint.retention import Best, Every, Last, Policy, Tagged, Younger, kept_by_any, to_remove
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import FencedError, UsageError
from samerun.storage.memory import Memory


def entry(number: int, *, epoch: int = 1, updates: int | None = None) -> Entry:
    updates = number if updates is None else updates
    return Entry(
        name=f"u{updates:09d}-{number:08x}",
        epoch=epoch,
        progress=Progress(windows=Windows(number), updates=Updates(updates)),
        sequence=number,
        manifest_sha256="0" * 64,
        world_size=1,
        num_bytes=1,
        facts={"loss": 10.0 - number},
    )


@st.composite
def catalogs(draw: st.DrawFn) -> list[Entry]:
    numbers = draw(st.lists(st.integers(0, 60), max_size=12, unique=True))
    entries = [entry(n, epoch=draw(st.integers(1, 3))) for n in numbers]
    return sorted(entries, key=lambda e: e.age_key, reverse=True)


POLICIES: st.SearchStrategy[Policy] = st.one_of(
    st.integers(1, 6).map(Last),
    st.integers(1, 20).map(Every),
    st.integers(1, 4).map(lambda n: Best(n, lambda e: e.facts["loss"])),
    st.integers(0, 60).map(lambda n: Younger(lambda e: 60.0 - e.progress.windows.value, n)),
)


@given(catalogs(), st.lists(POLICIES, max_size=3), st.data(), st.integers(0, 4))
def test_what_must_stay_stays(entries: list[Entry], policies: list[Policy], data: st.DataObject, epoch: int) -> None:
    names = [e.name for e in entries]
    proven = data.draw(st.sets(st.sampled_from(names))) if names else set()
    kept = kept_by_any(policies, entries)
    gone = to_remove(entries, kept, epoch=epoch, proven=proven)
    assert set(gone) <= set(names)
    assert not set(gone) & kept
    assert all(e.epoch <= epoch for e in entries if e.name in gone)
    if not proven:
        assert gone == []
    else:
        assert next(name for name in names if name in proven) not in gone
    assert gone == sorted(gone, key=names.index, reverse=True)


@given(catalogs(), st.integers(1, 20))
def test_every_keeps_exactly_one_of_each_stretch(entries: list[Entry], updates: int) -> None:
    kept = [e for e in entries if e.name in Every(updates).kept(entries)]
    stretches = [e.progress.updates.value // updates for e in kept]
    assert sorted(stretches) == sorted({e.progress.updates.value // updates for e in entries})


@given(catalogs())
def test_adding_a_policy_never_removes_more(entries: list[Entry]) -> None:
    one = kept_by_any([Last(2)], entries)
    two = kept_by_any([Last(2), Every(10)], entries)
    assert one <= two


def test_best_takes_the_lowest_or_highest_and_no_nan() -> None:
    entries = [entry(n) for n in (3, 2, 1)]
    scores = {3: float("nan"), 2: 0.5, 1: 0.7}

    def score(e: Entry) -> float | None:
        return scores[e.progress.windows.value]

    assert Best(1, score).kept(entries) == {entries[1].name}
    assert Best(1, score, higher_is_better=True).kept(entries) == {entries[2].name}
    assert Best(5, lambda e: None).kept(entries) == set()


def test_unknown_age_is_young_and_counts_are_checked() -> None:
    assert Younger(lambda e: None, 1.0).kept([entry(1)]) == {entry(1).name}
    assert Tagged(frozenset({"x"})).kept([entry(1)]) == set()
    with pytest.raises(UsageError):
        Last(0)
    with pytest.raises(UsageError):
        Every(0)


def save(store: Store, windows: int) -> str:
    progress = Progress(windows=Windows(windows), updates=Updates(windows))
    return store.save({"weights": Captured(tensors={"w": torch.ones(2)})}, progress, facts={}).result().name


def test_an_older_attempt_removes_nothing_once_a_newer_one_exists() -> None:
    storage = Memory()
    old, new = Store(storage, keep_last=1), Store(storage, keep_last=9)
    first = save(old, 1)
    new.open_attempt({})
    second = save(new, 2)
    before = dict(storage.objects)
    with pytest.raises(FencedError, match="attempt 1, attempt 2 has started since"):
        old.prune()
    with pytest.raises(FencedError):
        save(old, 3)
    plan = plan_pruning(storage, [Last(1)], epoch=1, proven={first})
    assert (plan.removed, plan.unfinished) == ((), ())
    assert storage.objects == before
    assert [e.name for e in Store(storage).catalog().entries] == [second, first]


@pytest.mark.parametrize("saves_before_it", [False, True])
def test_a_slower_attempt_that_commits_late_is_never_the_newest(saves_before_it: bool) -> None:
    """The zombie had passed every check before the newer attempt began; what it publishes is older than any of its."""
    storage = Memory()
    new = Store(storage)
    started: list[int] = []
    names: list[str] = []

    def at(point: str) -> None:
        if point == "save:manifest" and not started:
            started.append(new.open_attempt({}))
            if saves_before_it:
                names.append(save(new, 1))

    late = save(Store(storage, at=at), 500)
    if not names:
        names.append(save(new, 1))
    catalog = new.catalog()
    assert catalog.entries[0].name == names[0]
    assert [e.name for e in catalog.entries[1:]] + [r.name for r in catalog.rejected] == [late]
    assert names[0] in storage.objects["latest.json"].decode()


def test_foreign_things_among_the_checkpoints_are_left_alone() -> None:
    storage = Memory()
    store = Store(storage, keep_last=1)
    storage.preload("checkpoints/notes/readme.txt", b"mine")
    storage.preload("checkpoints/u000000001-0000000g/x", b"mine")
    for windows in range(3):
        save(store, windows)
    assert storage.objects["checkpoints/notes/readme.txt"] == b"mine"
    assert storage.objects["checkpoints/u000000001-0000000g/x"] == b"mine"
    assert len(store.catalog().entries) == 1
    assert {r.name for r in store.catalog().rejected} == {"notes", "u000000001-0000000g"}


def test_a_damaged_manifest_is_evidence_and_stays() -> None:
    storage = Memory()
    store = Store(storage, keep_last=1)
    name = save(store, 1)
    storage.preload(f"checkpoints/{name}/manifest.json", b"{}\n")
    save(store, 2)
    save(store, 3)
    assert f"checkpoints/{name}/manifest.json" in storage.objects
    assert replace(entry(1), sequence=2).age_key > entry(1).age_key
