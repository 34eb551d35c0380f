"""Any sequence of saves, tags, restarts, damage and loads against a model that fits in memory."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from samerun.checkpoint import Store
from samerun.checkpoint.catalog import Entry
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import CheckpointError, FencedError
from samerun.storage.memory import Memory

KEEP = 2


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.storage = Memory()
        self.saved: dict[str, tuple[tuple[int, int, int], float]] = {}
        self.tags: dict[str, str] = {}
        self.damaged: set[str] = set()
        self.windows = 0
        self.saves = 0
        self.store = self._attempt()

    stale = Bundle("stale")

    def _attempt(self) -> Store:
        store = Store(self.storage, keep_last=KEEP)
        self.epoch = store.open_attempt({})
        return store

    @rule(target=stale)
    def restart(self) -> Store:
        old, self.store = self.store, self._attempt()
        return old

    @rule(value=st.floats(allow_nan=False, width=32), advance=st.integers(0, 3), tag=st.sampled_from([None, "a", "b"]))
    def save(self, value: float, advance: int, tag: str | None) -> None:
        self.windows += advance
        progress = Progress(windows=Windows(self.windows), updates=Updates(self.windows))
        state = {"weights": Captured(tensors={"w": torch.full((5,), value)})}
        entry = self.store.save(state, progress, facts={}, tags=[tag] if tag else []).result()
        self.saves += 1
        self.saved[entry.name] = (self.epoch, self.windows, self.saves), value
        if tag:
            self.tags[tag] = entry.name

    @rule(old=stale)
    def a_zombie_saves(self, old: Store) -> None:
        before = dict(self.storage.objects)
        try:
            old.save({"weights": Captured()}, Progress(windows=Windows(10**6)), facts={}).result()
        except FencedError:
            assert self.storage.objects == before
            return
        raise AssertionError("a fenced attempt saved")

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Bytes rot, but never in the last sound checkpoint: nothing could be promised then."""
        sound = [entry.name for entry in self._entries() if entry.name not in self.damaged]
        if len(sound) < 2:
            return
        name = data.draw(st.sampled_from(sound))
        key = f"checkpoints/{name}/rank-00000.safetensors"
        rotten = bytearray(self.storage.objects[key])
        rotten[data.draw(st.integers(0, len(rotten) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.storage.preload(key, bytes(rotten))
        self.damaged.add(name)

    @rule(tag=st.sampled_from(["a", "b"]), data=st.data())
    def tag(self, tag: str, data: st.DataObject) -> None:
        entries = self._entries()
        if entries:
            entry = data.draw(st.sampled_from(entries))
            self.store.tag(tag, entry)
            self.tags[tag] = entry.name

    def _entries(self) -> list[Entry]:
        return list(self.store.catalog().entries)

    @invariant()
    def order_is_by_attempt_then_windows_then_save(self) -> None:
        names = [entry.name for entry in self._entries()]
        assert names == sorted(names, key=lambda name: self.saved[name][0], reverse=True)

    @invariant()
    def what_must_stay_is_there(self) -> None:
        names = {entry.name for entry in self._entries()}
        newest = sorted(self.saved, key=lambda name: self.saved[name][0], reverse=True)[:KEEP]
        assert names >= set(newest)
        assert names >= set(self.tags.values())

    @invariant()
    def every_load_is_what_was_saved_or_an_error(self) -> None:
        for entry in self._entries():
            target = torch.zeros(5)
            with self.store.open(entry) as checkpoint:
                try:
                    checkpoint.source("weights").read_into("w", target)
                except CheckpointError:
                    assert entry.name in self.damaged
                    continue
            assert entry.name not in self.damaged
            assert target.tolist() == [self.saved[entry.name][1]] * 5


StoreMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreMachine = StoreMachine.TestCase
