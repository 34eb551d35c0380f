"""Faults that people reported of data loading, each named after its kind, with the right answer.

Where a fault belongs to one part alone, its test is in tests/unit/data; the ones here need a whole little training:
a fresh process's worth of objects for each attempt, resumed twice in an epoch, with the global generators disturbed.
"""

import itertools
import json
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from samerun.data import Data, DataSource, PackedDocuments, Replica, Stream, WindowSampler, as_source
from samerun.errors import UsageError

torch.set_num_threads(1)
N, BATCH, MICRO = 20, 6, 2


class Samples:
    def __init__(self, n: int = N) -> None:
        self.n, self.reads = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, float]:
        self.reads += 1
        return i, random.random() + np.random.rand() + float(torch.rand((), dtype=torch.float64))


def by_data(**options: Any) -> Data:
    return Data(Samples(), **{"global_batch": BATCH, "micro_batch": MICRO, "seed": 7, "collate_fn": list} | options)


def by_sampler(global_batch: int = BATCH) -> DataSource:
    sampler = WindowSampler(Samples(), global_batch=global_batch, micro_batch=MICRO, seed=7)
    return as_source(DataLoader(Samples(), batch_sampler=sampler, collate_fn=list))  # type: ignore[arg-type]


MAKERS = {"data": by_data, "sampler": by_sampler}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
Log = list[tuple[int, int, tuple[tuple[int, int], ...], Any]]


def attempt(
    make: Any, state: dict | None, decided: int, *, replica: Replica | None = None, left: int = 1
) -> tuple[Log, dict]:
    """One attempt in fresh objects: decides windows, begins another one, and is killed."""
    poison = random.SystemRandom().randrange(2**31)
    random.seed(poison), np.random.seed(poison), torch.manual_seed(poison)
    source = make()
    log: Log = []
    try:
        source.attach(replica or Replica())
        if state is not None:
            source.load_state_dict(json.loads(json.dumps(state)))
        windows = source.windows()
        for window in itertools.islice(windows, decided):
            log += [(window.index, b.number, b.samples, b.value) for b in window]
            source.commit(window)
        list(itertools.islice(next(windows), left))
        return log, source.state_dict()
    finally:
        source.close()


def chain(make: Any, *decided: int) -> Log:
    log: Log = []
    state = None
    for count in decided:
        part, state = attempt(make, state, count)
        log += part
    return log


@both
def test_second_resume_in_one_epoch_is_absolute_not_a_difference(make: Any) -> None:
    assert chain(make, 1, 1, 1, 3) == chain(make, 6)


@both
def test_order_of_the_resumed_epoch_is_that_of_its_number(make: Any) -> None:
    """Stopped in the middle of the second of three epochs: not the first epoch's order again."""
    assert chain(make, 5, 5) == chain(make, 10)
    epochs = [[s for _, _, samples, _ in chain(make, 10) for e, s in samples if e == epoch] for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) == list(range(N))
    assert epochs[0] != epochs[1] != epochs[2]


@both
def test_the_resumed_offset_is_used_once_not_in_every_later_epoch(make: Any) -> None:
    resumed = [s for _, _, samples, _ in chain(make, 3, 17) for s in samples]
    assert sorted(resumed) == [(e, s) for e in range(6) for s in range(N)]


@both
def test_state_before_the_first_batch_and_right_after_a_load(make: Any) -> None:
    _, first = attempt(make, None, 0)
    _, again = attempt(make, first, 0)
    assert first == again
    _, later = attempt(make, first, 4)
    _, same = attempt(make, later, 0)
    assert later == same
    assert chain(make, 0, 0, 4, 0, 2) == chain(make, 6)


@both
def test_state_at_the_end_of_an_epoch_means_the_next_epochs_first_sample(make: Any) -> None:
    """Exhausted, it goes on with the epoch after; and again from there."""

    def halves() -> DataSource:
        return make(global_batch=10)

    log, state = attempt(halves, None, 2)
    assert state["position"] == N
    following, state = attempt(halves, state, 2)
    assert [e for _, _, samples, _ in following for e, _ in samples] == [1] * 20
    last, _ = attempt(halves, state, 1)
    assert [e for _, _, samples, _ in last for e, _ in samples] == [2] * 10
    assert log + following + last == attempt(halves, None, 5)[0]


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_prefetched_samples_do_not_count_and_are_not_lost(num_workers: int, left: int) -> None:
    options = {"num_workers": num_workers, "prefetch_factor": 32 if num_workers else None}

    def make() -> Data:
        return by_data(**options)

    first, state = attempt(make, None, 2, left=left)
    assert state["position"] == 2 * BATCH
    assert first + attempt(make, state, 3)[0] == attempt(by_data, None, 5)[0]


def test_persistent_workers_are_one_stream() -> None:
    def make() -> Data:
        return by_data(num_workers=2, persistent_workers=True)

    assert chain(make, 4, 4) == chain(by_data, 8)


def test_absolute_window_numbers_after_a_resume() -> None:
    """Who enumerates from 0 after a resume believes that it failed."""
    log = chain(by_data, 4, 2)
    assert sorted({index for index, _, _, _ in log}) == [0, 1, 2, 3, 4, 5]


def test_replicated_ranks_are_not_counted_as_samples() -> None:
    """Two tensor-parallel peers are one replica: both see the same microbatches and save the same cursor."""
    peers = [attempt(by_data, None, 2, replica=Replica(index=1, count=2)) for _ in range(2)]
    assert peers[0] == peers[1] and peers[0][1]["samples"] == 2 * BATCH


def test_growing_and_shrinking_ranks_lose_nothing() -> None:
    def all_ranks(state: dict | None, count: int, decided: int) -> tuple[Log, dict]:
        parts = [attempt(by_data, state, decided, replica=Replica(index=r, count=count)) for r in range(count)]
        assert all(saved == parts[0][1] for _, saved in parts)
        return sorted(itertools.chain.from_iterable(log for log, _ in parts)), parts[0][1]

    log: Log = []
    state = None
    for count in (3, 1, 2, 3, 2, 1):
        part, state = all_ranks(state, count, 2)
        log += part
    assert log == attempt(by_data, None, 12)[0]


def test_a_replica_that_fails_does_not_advance_alone() -> None:
    """One rank delivered a window that was never decided: after the restart all ranks stand at the same place."""
    ahead, state = attempt(by_data, None, 2, replica=Replica(index=0, count=2), left=2)
    _, behind = attempt(by_data, None, 2, replica=Replica(index=1, count=2), left=0)
    assert state == behind
    assert ahead[-1][0] == 1


def test_many_microbatches_in_a_window_are_fast_forwarded_whole() -> None:
    def make() -> Data:
        return by_data(global_batch=8, micro_batch=1)

    assert chain(make, 3, 3) == chain(make, 6)
    assert attempt(make, None, 3)[1]["position"] == 24


def test_epochs_differ_without_anyone_calling_set_epoch() -> None:
    log = chain(lambda: by_data(global_batch=10), 6)
    orders = [tuple(s for w, _, samples, _ in log if w // 2 == epoch for _, s in samples) for epoch in range(3)]
    assert len(set(orders)) == 3


def test_a_far_position_opens_nothing_before_it() -> None:
    dataset = Samples(10**7)
    begin = time.perf_counter()
    with Data(dataset, global_batch=8, micro_batch=2) as data:
        data.load_state_dict(data.state_dict() | {"position": 10**6, "samples": 10**6, "windows": 10**6 // 8})
        windows = data.windows()
        next(windows)
        assert dataset.reads == 0
    assert time.perf_counter() - begin < 1.0


def test_masks_do_not_follow_the_global_generators_or_the_workers() -> None:
    runs = [attempt(lambda w=workers: by_data(num_workers=w), None, 5)[0] for workers in (0, 1, 2)]
    assert runs[0] == runs[1] == runs[2]


def test_uneven_shards_never_pad_with_repeated_samples() -> None:
    """23 samples on 3 ranks: no padding, no dropped tail, no rank without a microbatch."""
    parts = []
    for r in range(3):
        log, _ = attempt(lambda: by_data(global_batch=7), None, 23, replica=Replica(index=r, count=3), left=0)
        assert len({w for w, _, _, _ in log}) == 23
        parts += log
    seen = [pair for _, _, samples, _ in parts for pair in samples]
    assert len(seen) == len(set(seen)) == 23 * 7
    assert sorted(seen)[: 8 * N] == [(e, s) for e in range(8) for s in range(N)]


def test_packed_positions_count_sequences_whatever_the_documents() -> None:
    lengths = [3, 9, 1, 14, 6]
    text = [[100 * d + i for i in range(n)] for d, n in enumerate(lengths)]

    def make(workers: int = 0) -> Data:
        packed = PackedDocuments(text, lengths, sequence_length=4, seed=1)

        def collate(items: list[dict]) -> list[list[int]]:
            return [item["tokens"].tolist() for item in items]

        return Data(packed, global_batch=3, micro_batch=1, num_workers=workers, collate_fn=collate)

    assert chain(make, 1, 1, 1, 4) == chain(make, 7) == attempt(lambda: make(2), None, 7)[0]


def test_exactly_one_owner_moves_the_cursor() -> None:
    """A loader that was fast-forwarded by someone else as well would stop early or skip."""
    sampler = WindowSampler(Samples(), global_batch=BATCH, micro_batch=MICRO)
    loader = DataLoader(Samples(), batch_sampler=sampler)  # type: ignore[arg-type]
    next(iter(loader))
    with pytest.raises(UsageError, match="already iterated"):
        as_source(loader)
    with pytest.raises(UsageError, match="already iterated"):
        sampler.load_state_dict(sampler.state_dict())


def test_another_rank_count_of_separate_streams_is_loud_in_both_directions() -> None:
    def stream(index: int, count: int) -> Stream:
        result = Stream(range(index, 100, count), shared=False, microbatches_per_window=8)
        result.attach(Replica(index=index, count=count))
        return result

    for before, after in ((4, 2), (2, 4), (8, 1)):
        with pytest.raises(UsageError, match=f"{before} streams of their own became {after}"):
            stream(0, after).load_state_dict(stream(0, before).state_dict())


def test_a_partial_first_epoch_does_not_shorten_later_ones() -> None:
    """Stopped inside the first epoch of a stream: each later epoch is whole again."""

    def make() -> Stream:
        return Stream(list(range(7)), microbatches_per_window=2)

    log: list[int] = []
    state = None
    for decided in (2, 9):
        with make() as stream:
            if state is not None:
                stream.load_state_dict(state)
            for window in itertools.islice(stream.windows(), decided):
                log += [b.value for b in window]
                stream.commit(window)
            state = stream.state_dict()
    assert log == [i % 7 for i in range(22)]


def test_the_state_holds_no_pickle_and_no_class() -> None:
    for source in (by_data(), by_sampler(), Stream([1, 2])):
        text = json.dumps(source.state_dict(), allow_nan=False)
        assert len(text) < 1024 and "samerun." not in text.replace("samerun.data", "")
        source.close()


def test_saving_each_window_costs_next_to_nothing() -> None:
    """A snapshot at every step once made 10 ms into 2 s."""
    with Data(range(10**6), global_batch=8, micro_batch=8, num_workers=0) as data:
        begin = time.perf_counter()
        for _ in range(1000):
            data.state_dict()
        assert (time.perf_counter() - begin) / 1000 < 1e-3
