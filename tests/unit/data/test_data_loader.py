import itertools
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from samerun.data import Data, Guarantee, Replica
from samerun.data.coverage import mix64
from samerun.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")  # more than this machine's cores


class Counted(Dataset):
    """Sample i is the number i; reads are counted in this process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        self.reads.append(i)
        return i


class Drawing(Counted):
    """Sample i with a draw from each global generator."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def drawing_collate(items: list[torch.Tensor]) -> torch.Tensor:
    tail = torch.tensor([-1.0, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
    return torch.stack([*items, tail])


def take(data: Data, num_windows: int, *, commit: bool = True) -> dict[tuple[int, int], list]:
    """(window, microbatch) → value as a list, of this replica."""
    result = {}
    for window in itertools.islice(data.windows(), num_windows):
        for batch in window:
            value = batch.value
            result[window.index, batch.number] = value.tolist() if isinstance(value, torch.Tensor) else value
        if commit:
            data.commit(window)
    return result


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_windows_hold_the_planned_samples(num_workers: int) -> None:
    with Data(Counted(13), global_batch=7, micro_batch=3, seed=7, num_workers=num_workers) as data:
        assert data.guarantee is Guarantee.EXACT and data.samples_per_epoch == 13
        seen = []
        for window in itertools.islice(data.windows(), 4):
            assert (window.start, window.end) == (7 * window.index, 7 * window.index + 7)
            assert (window.num_microbatches, window.slots, window.num_samples) == (3, 3, 7)
            batches = list(window)
            assert [b.number for b in batches] == [0, 1, 2] and [b.num_samples for b in batches] == [3, 3, 1]
            assert sum(b.coverage for b in batches) % 2**64 == window.coverage
            for batch in batches:
                assert batch.value.tolist() == [sample for _, sample in batch.samples]
                assert batch.coverage == sum(mix64(e, s) for e, s in batch.samples) % 2**64
                seen += batch.samples
            data.commit(window)
        assert sorted(seen)[:26] == [(e, s) for e in (0, 1) for s in range(13)]
        assert seen[0][0] == 0 and data.state_dict()["position"] == 28


def test_coverage_is_of_the_batch_that_arrived() -> None:
    """A broken feed that delivers another sample than planned shows in the coverage."""
    from samerun.data.fetch import keyed

    class Swapped(keyed.KeyedFetch):
        def fetch(self, plans):  # type: ignore[no-untyped-def]
            from dataclasses import replace

            (epoch, sample), *rest = plans[0].samples
            return super().fetch([replace(plans[0], samples=((epoch, (sample + 1) % 13), *rest)), *plans[1:]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samerun.data.fetch.feed.KeyedFetch", Swapped)
        with Data(Counted(13), global_batch=6, micro_batch=3) as data:
            window = next(data.windows())
            assert sum(b.coverage for b in window) % 2**64 != window.coverage


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_microbatches_are_the_same_for_any_replicas(count: int) -> None:
    def all_replicas(count: int) -> dict:
        merged = {}
        for r in range(count):
            with Data(Counted(29), global_batch=13, micro_batch=3, seed=1) as data:
                data.attach(Replica(index=r, count=count))
                merged |= take(data, 4)
        return merged

    assert all_replicas(count) == all_replicas(1)
    assert len(all_replicas(1)) == 4 * 5


def test_slots_and_uneven_shares() -> None:
    with Data(Counted(100), global_batch=10, micro_batch=2) as data:
        data.attach(Replica(index=2, count=3))
        window = next(data.windows())
        assert (window.num_microbatches, window.slots) == (5, 2)
        assert [b.number for b in window] == [2]


def test_a_batch_too_small_for_the_replicas_is_refused_before_iteration() -> None:
    with (
        Data(Counted(100), global_batch=8, micro_batch=3) as data,
        pytest.raises(UsageError, match=r"global_batch=8.*3·3 = 9"),
    ):
        data.attach(Replica(index=0, count=3))


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_random_draws_belong_to_the_sample(num_workers: int) -> None:
    """The same masks for 0, 1 and 4 workers, with the caller's generators in any state."""

    def drawn(workers: int, poison: int) -> dict:
        random.seed(poison), np.random.seed(poison), torch.manual_seed(poison)
        options = {"num_workers": workers, "collate_fn": drawing_collate}
        with Data(Drawing(11), global_batch=4, micro_batch=2, seed=7, **options) as data:  # type: ignore[arg-type]
            return take(data, 6)

    one = drawn(0, 1)
    assert drawn(num_workers, 2) == one
    rows = [tuple(row) for batch in one.values() for row in batch]
    assert len(set(rows)) == len(rows), "epochs and samples have draws of their own"


def test_collate_draws_by_the_position_of_its_microbatch() -> None:
    """Not by what its last sample happened to leave of its own draws."""
    from samerun.data.fetch.keyed import GeneratorsPutBack, seed_generators

    with Data(Drawing(11), global_batch=4, micro_batch=2, seed=7, collate_fn=drawing_collate) as data:
        found = take(data, 3)
    for (window, number), rows in found.items():
        with GeneratorsPutBack():
            seed_generators("collate", 7, 4 * window + 2 * number)
            assert rows[-1] == drawing_collate([])[-1].tolist()


def test_random_draws_do_not_depend_on_replicas() -> None:
    def drawn(count: int) -> dict:
        merged = {}
        for r in range(count):
            with Data(Drawing(11), global_batch=6, micro_batch=2, seed=7, collate_fn=drawing_collate) as data:
                data.attach(Replica(index=r, count=count))
                merged |= take(data, 4)
        return merged

    assert drawn(1) == drawn(2) == drawn(3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_callers_generators_are_untouched(num_workers: int) -> None:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    with Data(Drawing(11), global_batch=4, micro_batch=2, num_workers=num_workers) as data:
        take(data, 3)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_generators_are_put_back_after_an_error() -> None:
    class Failing(Counted):
        def __getitem__(self, i: int) -> int:
            torch.rand(3)
            raise KeyError(i)

    before = torch.get_rng_state()
    with Data(Failing(5), global_batch=4, micro_batch=2) as data, pytest.raises(KeyError) as caught:
        list(next(data.windows()))
    assert torch.equal(torch.get_rng_state(), before)
    assert "of epoch 0" in caught.value.__notes__[0]


def test_nothing_is_read_before_it_is_asked_for() -> None:
    dataset = Counted(100)
    with Data(dataset, global_batch=4, micro_batch=2) as data:
        windows = data.windows()
        window = next(windows)
        assert dataset.reads == []
        batches = iter(window)
        next(batches)
        assert len(dataset.reads) == 2


@pytest.mark.parametrize(("limit", "sizes"), [(math.inf, [1, 4, 4, 1]), (-1.0, [1] * 10)], ids=["quick", "slow"])
def test_quick_samples_are_read_together_and_never_beyond_their_window(
    limit: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without workers: what has no time to gain waits for its turn, so that a device computes meanwhile."""
    monkeypatch.setattr("samerun.data.fetch.feed._QUICK_SECONDS", limit)
    dataset, seen = Counted(100), []
    with Data(dataset, global_batch=20, micro_batch=2) as data:
        for window in itertools.islice(data.windows(), 3):
            for batch in window:
                seen.append(batch.number)
                dataset.reads.append(-1)  # a forward
            assert dataset.reads.count(-1) == len(seen) == len(dataset.reads) - 20 * (window.index + 1)
            data.commit(window)
        assert seen == [*range(10)] * 3
    turns = "".join("f" if read < 0 else "r" for read in dataset.reads)
    first = "".join("rr" * size + "f" * size for size in sizes)
    later = first if limit < 0 else "".join("rr" * size + "f" * size for size in [4, 4, 2])
    assert turns == first + later + later


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_read_together_is_what_is_read_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a replica has fewer microbatches than the others, and across epochs of 13."""

    def everything(limit: float) -> list[dict[tuple[int, int], list]]:
        monkeypatch.setattr("samerun.data.fetch.feed._QUICK_SECONDS", limit)
        taken = []
        for index in range(count):
            with Data(Drawing(13), global_batch=20, micro_batch=3, collate_fn=drawing_collate) as data:
                data.attach(Replica(index=index, count=count))
                taken.append(take(data, 5))
        return taken

    assert everything(math.inf) == everything(-1.0)


def test_a_far_cursor_reads_nothing_that_was_skipped() -> None:
    """28 hours were once spent reading and dropping: here a position of a billion costs nothing."""

    class Endless:
        def __len__(self) -> int:
            return 10**9 + 7

        def __getitem__(self, i: int) -> int:
            reads.append(i)
            return i

    reads: list[int] = []
    with Data(Endless(), global_batch=8, micro_batch=4, seed=1) as data:
        saved = data.state_dict() | {"position": 10**9, "samples": 10**9, "windows": 10**9 // 8}
        begin = time.perf_counter()
        data.load_state_dict(saved)
        window = next(data.windows())
        next(iter(window))
        assert time.perf_counter() - begin < 0.5
    assert len(reads) == 4 and window.start == 10**9


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_in_a_fresh_source_continues_at_the_committed_window(num_workers: int) -> None:
    options = {"global_batch": 5, "micro_batch": 2, "seed": 3, "num_workers": num_workers}
    if num_workers:
        options["prefetch_factor"] = 16
    with Data(Counted(13), **options) as twin:  # type: ignore[arg-type]
        whole = take(twin, 9)
    with Data(Counted(13), **options) as first:  # type: ignore[arg-type]
        part = take(first, 3)
        interrupted = next(iter(next(first.windows())))
        assert interrupted.value.tolist() == whole[3, 0]
        state = first.state_dict()
        assert first.positions.produced >= first.positions.delivered > first.positions.committed == 15
    with Data(Counted(13), **options) as second:  # type: ignore[arg-type]
        second.load_state_dict(state)
        assert second.state_dict() == state
        part |= take(second, 6)
    assert part == whole


def test_windows_again_continues_the_same_stream() -> None:
    dataset = Counted(100)
    with Data(dataset, global_batch=4, micro_batch=2) as data:
        take(data, 2)
        stale = data.windows()
        take(data, 2)
        assert len(dataset.reads) == 16
        with pytest.raises(UsageError, match="ended"):
            next(stale), next(stale)


def test_an_undecided_window_is_read_again() -> None:
    with Data(Counted(100), global_batch=4, micro_batch=2) as data:
        first = take(data, 1, commit=False)
        assert take(data, 1) == first
        assert take(data, 1).keys() == {(1, 0), (1, 1)}


def test_what_a_loop_leaves_behind_is_dropped_not_delivered_later() -> None:
    with Data(Counted(100), global_batch=6, micro_batch=2) as data:
        windows = data.windows()
        first, second, third = (next(windows) for _ in range(3))
        next(iter(first))
        assert [b.number for b in third] == [0, 1, 2]
        with pytest.raises(UsageError, match="was passed over"):
            next(iter(second))
    with Data(Counted(100), global_batch=6, micro_batch=2) as data:
        windows = data.windows()
        data.commit(next(windows))
        second = next(windows)
        assert second.index == 1 and [b.number for b in second] == [0, 1, 2]
        with pytest.raises(UsageError, match="window 1 was already iterated"):
            next(iter(second))


def test_a_decided_window_nobody_read_is_passed_over() -> None:
    with (
        Data(Counted(100), global_batch=4, micro_batch=2) as data,
        Data(range(100), global_batch=4, micro_batch=2) as u,
    ):
        whole = take(u, 4)
        windows = data.windows()
        window = next(windows)
        first = [b.value.tolist() for b in window]
        assert first == [whole[0, 0], whole[0, 1]]
        data.commit(window)
        data.commit(next(windows))
        third = next(windows)
        assert [b.value.tolist() for b in third] == [whole[2, 0], whole[2, 1]]


def test_close_ends_an_iteration_and_allows_a_state() -> None:
    data = Data(Counted(100), global_batch=4, micro_batch=2)
    state = data.state_dict()
    windows = data.windows()
    window = next(windows)
    batches = iter(window)
    next(batches)
    with pytest.raises(UsageError, match="already iterated"):
        data.load_state_dict(state)
    data.close()
    data.close()
    with pytest.raises(UsageError, match="ended"):
        next(batches)
    with pytest.raises(UsageError, match="ended"):
        next(windows)
    data.load_state_dict(state)
    assert data.state_dict() == state


def test_batches_are_moved_to_the_device() -> None:
    Pair = namedtuple("Pair", ["a", "b"])

    def collate(items: list[int]) -> dict:
        row = torch.tensor(items)
        return {"x": row, "pair": Pair(row, "text"), "list": [row, 3], "tuple": (row,)}

    with Data(Counted(10), global_batch=4, micro_batch=2, device="meta", collate_fn=collate) as data:
        value = next(iter(next(data.windows()))).value
    tensors = [value["x"], value["pair"].a, value["list"][0], value["tuple"][0]]
    assert {t.device.type for t in tensors} == {"meta"}
    assert value["pair"].b == "text" and value["list"][1] == 3


@pytest.mark.parametrize("device", ["nowhere", "hip:0", 3.5])
def test_a_device_that_is_not_there_is_refused_before_a_sample_is_read(device: object) -> None:
    dataset = Counted(10)
    with (
        Data(dataset, global_batch=2, micro_batch=1, device=device) as data,
        pytest.raises(UsageError, match=f"device={device!r} cannot be used here"),
    ):
        next(iter(next(data.windows())))
    assert dataset.reads == []


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_datasets_without_random_access_are_refused_and_stream_is_named() -> None:
    for dataset in (Stream(), iter([1, 2]), {1, 2}):
        with pytest.raises(UsageError, match=r"samerun\.data\.Stream"):
            Data(dataset, global_batch=2, micro_batch=1)

    class NoLength:
        def __getitem__(self, i: int) -> int:
            return i

    with pytest.raises(UsageError, match="no length"):
        Data(NoLength(), global_batch=2, micro_batch=1)


def test_arguments_that_choose_samples_are_refused() -> None:
    with pytest.raises(UsageError, match=r"does not take batch_size, shuffle"):
        Data(Counted(10), global_batch=2, micro_batch=1, shuffle=True, batch_size=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="num_workers=-1"):
        Data(Counted(10), global_batch=2, micro_batch=1, num_workers=-1)
    with (
        Data(Counted(10), global_batch=2, micro_batch=1, persistent_workers=True) as data,
        pytest.raises(UsageError, match="DataLoader refuses"),
    ):
        next(iter(next(data.windows())))


class FailsInWorker(Counted):
    def __getitem__(self, i: int) -> int:
        raise RuntimeError(f"cannot read {i}")


def test_an_error_in_a_worker_arrives_and_leaves_no_process() -> None:
    others = children()
    with Data(FailsInWorker(50), global_batch=4, micro_batch=2, num_workers=2) as data:
        windows = data.windows()
        with pytest.raises(RuntimeError, match=r"cannot read \d+"):
            list(next(windows))
        assert children() == others


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def test_workers_ignore_the_signals_of_launchers_and_end_on_close() -> None:
    others = children()  # the ranks that other tests keep
    with Data(Counted(1000), global_batch=4, micro_batch=2, num_workers=2) as data:
        expected = take(data, 2)
        workers = [pid for pid in children() if pid not in others]
        assert len(workers) == 2
        for pid, number in itertools.product(workers, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)):
            os.kill(pid, number)
        more = take(data, 20)
        assert set(children()) == {*others, *workers} and len(expected) + len(more) == 44
    assert children() == others


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from samerun.data import Data
class Slow:
    def __len__(self): return 1000
    def __getitem__(self, i): return i
if __name__ == "__main__":
    data = Data(Slow(), global_batch=4, micro_batch=2, num_workers=2, persistent_workers={persistent},
                multiprocessing_context={context!r})
    for window in data.windows():
        for batch in window: pass
        data.commit(window)
        if window.index == 3: {end}
"""


@pytest.mark.parametrize(
    ("end", "context", "persistent"),
    [
        ("break", "spawn", False),
        ("break", "fork", True),
        ("raise RuntimeError('on purpose')", "fork", False),
        ("raise SystemExit(75)", "fork", False),
    ],
)
def test_a_process_that_never_closed_its_data_still_ends(
    tmp_path: Path, end: str, context: str, persistent: bool
) -> None:
    """Workers ignore SIGTERM, so multiprocessing's own exit hook would wait for ever."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(context=context, persistent=persistent, end=end))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == {"b": 0, "r": 1}[end[0]] if "75" not in end else 75
    assert ("on purpose" in done.stderr) == ("on purpose" in end)
    assert "Warning" not in done.stderr and "Exception ignored" not in done.stderr
