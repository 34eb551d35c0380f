"""Any schedule of kills, resumes and rank counts gives the sample sequence of a plain model in memory."""

import itertools
import json
import random
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.data import Data, Replica
from samerun.data.order import Order

torch.set_num_threads(1)


@dataclass(frozen=True)
class Shape:
    num_samples: int
    global_batch: int
    micro_batch: int
    seed: int
    drop_tail: bool
    skip: tuple[tuple[int, int], ...]


def plain_model(shape: Shape, num_windows: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(window, microbatch) → its (epoch, sample) pairs, by lists and slices."""
    n, batch = shape.num_samples, shape.global_batch
    order = Order(num_samples=n, seed=shape.seed)
    stream: list[tuple[int, int]] = []
    position = 0
    for epoch in itertools.count():
        ids = order.lookup(np.full(n, epoch), np.arange(n)).tolist()
        for sample in ids[: n - n % batch] if shape.drop_tail else ids:
            if not any(a <= position < b for a, b in shape.skip):
                stream.append((epoch, sample))
            position += 1
        if len(stream) >= num_windows * batch:
            break
    windows = [stream[w * batch : (w + 1) * batch] for w in range(num_windows)]
    m = shape.micro_batch
    return {(w, k): part[k * m : (k + 1) * m] for w, part in enumerate(windows) for k in range(-(-batch // m))}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    batch = draw(st.integers(1, 17))
    drop_tail = draw(st.booleans())
    skip: list[tuple[int, int]] = []
    position = 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3)):
        unit = batch if drop_tail else 1
        skip.append(((position + gap) * unit, (position + gap + length) * unit))
        position += gap + length
    return Shape(
        num_samples=draw(st.integers(batch if drop_tail else 1, 40)),
        global_batch=batch,
        micro_batch=draw(st.integers(1, batch)),
        seed=draw(st.integers(-3, 3)),
        drop_tail=drop_tail,
        skip=tuple(skip),
    )


def build(shape: Shape) -> Data:
    return Data(
        range(shape.num_samples), global_batch=shape.global_batch, micro_batch=shape.micro_batch, seed=shape.seed,
        epoch_end="drop_tail" if shape.drop_tail else "straddle", skip=shape.skip, collate_fn=list,
    )  # fmt: skip


def attempt(
    shape: Shape, state: dict | None, count: int, decided: int, abandoned: int
) -> tuple[dict[tuple[int, int], list[tuple[int, int]]], dict]:
    """All replicas decide `decided` windows, read `abandoned` microbatches of the next ones, and are killed."""
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    states = []
    for r in range(count):
        with build(shape) as data:
            data.attach(Replica(index=r, count=count))
            if state is not None:
                data.load_state_dict(json.loads(json.dumps(state)))
            windows = data.windows()
            for window in itertools.islice(windows, decided):
                total = 0
                for batch in window:
                    assert batch.value == [sample for _, sample in batch.samples]
                    assert (window.index, batch.number) not in seen, "delivered twice"
                    seen[window.index, batch.number] = list(batch.samples)
                    total += batch.coverage
                assert count > 1 or total % 2**64 == window.coverage
                data.commit(window)
            for batch in itertools.islice((b for w in itertools.islice(windows, abandoned) for b in w), abandoned):
                assert batch.num_samples
            states.append(data.state_dict())
    assert all(s == states[0] for s in states), "the state is the same on every rank"
    return seen, states[0]


@settings(max_examples=120)
@given(shapes(), st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_any_schedule_gives_the_plain_models_samples(shape: Shape, schedule: list[tuple[int, int, int]]) -> None:
    largest = shape.global_batch // shape.micro_batch
    seen: dict = {}
    state = None
    for count, decided, abandoned in schedule:
        part, state = attempt(shape, state, min(count, largest), decided, abandoned)
        assert not set(part) & set(seen), "a decided window came again"
        seen |= part
    total = sum(decided for _, decided, _ in schedule)
    assert seen == plain_model(shape, total)
    assert state is not None and state["windows"] == total


def test_four_two_three_eight_ranks_with_two_resumes_in_each_epoch() -> None:
    shape = Shape(num_samples=41, global_batch=16, micro_batch=2, seed=7, drop_tail=False, skip=())
    seen: dict = {}
    state = None
    for count in (4, 2, 3, 8, 1, 4, 2, 3, 8):
        part, state = attempt(shape, state, count, 1, 2)
        seen |= part
    assert seen == plain_model(shape, 9)
    everything = [pair for _, pairs in sorted(seen.items()) for pair in pairs]
    assert sorted(everything[: 3 * 41]) == [(e, s) for e in range(3) for s in range(41)]


def test_the_model_notices_a_cursor_that_counts_prefetched_samples() -> None:
    """The check itself: a state that says `delivered` instead of `committed` must not pass."""
    shape = Shape(num_samples=20, global_batch=4, micro_batch=2, seed=1, drop_tail=False, skip=())
    seen, state = attempt(shape, None, 1, 2, 2)
    broken = state | {"position": 12, "samples": 12, "windows": 3}
    part, _ = attempt(shape, broken, 1, 2, 0)
    assert seen | part != plain_model(shape, 4)


@settings(max_examples=40)
@given(st.integers(1, 50), st.integers(1, 9), st.randoms(use_true_random=False))
def test_random_draws_survive_any_kill(num_samples: int, batch: int, poison: random.Random) -> None:
    def draws(kills: list[int]) -> list[float]:
        result: list[float] = []
        state = None
        for decided in kills:
            random.seed(poison.random())
            torch.manual_seed(poison.randrange(2**31))
            with Data(
                _Noise(num_samples), global_batch=batch, micro_batch=2 if batch > 1 else 1, collate_fn=list
            ) as data:
                if state is not None:
                    data.load_state_dict(state)
                for window in itertools.islice(data.windows(), decided):
                    result += [value for b in window for value in b.value]
                    data.commit(window)
                state = data.state_dict()
        return result

    assert draws([1, 0, 3, 2]) == draws([6])


class _Noise:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> float:
        return i + random.random() + np.random.rand() + torch.rand((), dtype=torch.float64).item()
