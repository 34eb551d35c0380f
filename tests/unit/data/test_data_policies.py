"""Every policy of the vocabulary, reached the way a user reaches it."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from samerun.data import Data, Replica, Stream
from samerun.data.elastic import Policy
from samerun.errors import UsageError


class Items:
    def __iter__(self) -> Any:
        return iter(range(1000))


def data(batch: int = 8, **options: Any) -> Data:
    return Data(list(range(100)), global_batch=batch, micro_batch=2, seed=7, **options)


def dealt(index: int, count: int, **options: Any) -> Stream:
    stream = Stream(range(index, 1000, count), shared=False, microbatches_per_window=12, **options)
    stream.attach(Replica(index=index, count=count))
    return stream


def state_after(source: Any, num_windows: int) -> dict[str, Any]:
    with source:
        windows = source.windows()
        for _ in range(num_windows):
            window = next(windows)
            list(window)
            source.commit(window)
        state: dict[str, Any] = json.loads(json.dumps(source.state_dict()))
    return state


def resumed(source: Any, state: dict[str, Any]) -> Any:
    source.load_state_dict(state)
    return source.decision


def test_exact_on_other_replicas() -> None:
    source = data()
    source.attach(Replica(index=1, count=3))
    assert resumed(source, state_after(data(), 3)).policy is Policy.EXACT


def test_rebatch() -> None:
    decision = resumed(data(12, on_change="rebatch"), state_after(data(), 3))
    assert (decision.policy, decision.position) == (Policy.REBATCH, 24)


def test_replay_with_its_bound() -> None:
    state = state_after(Stream(Items()), 5)
    enough = Stream(Items(), on_change="replay(5)")
    enough.attach(Replica())
    decision = resumed(enough, state)
    assert (decision.policy, decision.replayed) == (Policy.REPLAY, 5)
    short = Stream(Items(), on_change="replay(4)")
    short.load_state_dict(state)
    with pytest.raises(UsageError, match=r"5 batches to be read and dropped, more than max_replay=4"):
        next(short.windows())


@pytest.mark.parametrize(
    ("on_change", "policy", "repeated", "lost"),
    [("at-least-once", Policy.AT_LEAST_ONCE, 4, 0), ("at-most-once", Policy.AT_MOST_ONCE, 0, 1)],
)
def test_bounds_of_parts_that_are_dealt_anew(on_change: str, policy: Policy, repeated: int, lost: int) -> None:
    """24 items were read by 2; dealt anew to 5 they end in the middle of a round."""
    state = state_after(dealt(0, 2), 2)
    decision = resumed(dealt(0, 5, on_change=on_change), state)
    assert (decision.policy, decision.repeated_at_most, decision.lost_at_most) == (policy, repeated, lost)


class Part:
    """Every `count`-th of 60 items of an epoch, from item `index` on; with a state of its own if it is asked to."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.epoch, self.item = index, count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for item in range(self.index + self.item * self.count, 60, self.count):
            self.item += 1
            yield self.epoch * 60 + item
        self.item = 0


class StatefulPart(Part):
    def state_dict(self) -> dict[str, int]:
        return {"item": self.item}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.item = state["item"]


def parts(kind: type[Part], count: int, **options: Any) -> list[Stream]:
    streams = [
        Stream(kind(index, count), shared=False, microbatches_per_window=12, **options) for index in range(count)
    ]
    for index, stream in enumerate(streams):
        stream.attach(Replica(index=index, count=count))
    return streams


def read(stream: Stream, num_windows: int) -> list[int]:
    seen: list[int] = []
    windows = stream.windows()
    for _ in range(num_windows):
        window = next(windows)
        seen += [batch.value for batch in window]
        stream.commit(window)
    return seen


@pytest.mark.parametrize("kind", [Part, StatefulPart])
@pytest.mark.parametrize("num_windows", [2, 7])
@pytest.mark.parametrize("on_change", ["at-least-once", "at-most-once"])
def test_what_is_dealt_anew_is_what_the_epoch_has_left(kind: type[Part], num_windows: int, on_change: str) -> None:
    """Two replicas became four, in the first epoch and in the second: 24 items of it are done, the rest comes."""
    before = [(read(stream, num_windows), stream.state_dict()) for stream in parts(kind, 2)]
    assert sorted(chain.from_iterable(seen for seen, _ in before)) == list(range(12 * num_windows))
    after = parts(kind, 4, on_change=on_change)
    for stream in after:
        stream.load_state_dict(json.loads(json.dumps(before[0][1])))
        assert stream.decision is not None and stream.decision.position == 24
    rest = sorted(chain.from_iterable(read(stream, 3) for stream in after))
    assert rest == [12 * num_windows + i for i in range(36)]


def test_refuse() -> None:
    state = state_after(Stream(Items()), 5)
    waiting = Stream(Items(), on_change="refuse")
    with pytest.raises(UsageError, match=r"on_change='refuse': 5 items would be read again"):
        waiting.load_state_dict(state)
        waiting.attach(Replica())
    fresh = Stream(Items(), on_change="refuse")
    fresh.attach(Replica())
    fresh.load_state_dict(state_after(Stream(Items()), 0))
    assert fresh.decision is not None and fresh.decision.policy is Policy.EXACT
    with pytest.raises(UsageError, match="2 streams of their own became 5"):
        dealt(0, 5).load_state_dict(state_after(dealt(0, 2), 2))


def test_words_that_are_no_policy() -> None:
    for wrong in ("replay(many)", "replay(-1)", "sometimes"):
        with pytest.raises(UsageError, match=r"on_change=.*at-least-once.*refuse.*replay"):
            Stream(Items(), on_change=wrong)
