import itertools
import json
import logging
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from samerun.data import DataSource, Guarantee, Replica, Stream, as_source
from samerun.errors import UsageError

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Items(IterableDataset):
    """Any iterable: 7 batches an epoch, each naming its epoch and place, with a draw."""

    def __init__(self, n: int = 7) -> None:
        self.n, self.epoch, self.reads = n, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        for i in range(self.n):
            self.reads += 1
            yield (self.epoch, i, random.random())


class Counting:
    """An iterable with a state of its own, which it would count wrongly if it were asked at another moment."""

    def __init__(self, n: int = 7) -> None:
        self.n, self.at, self.reads, self.states = n, 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            self.reads += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict:
        self.states += 1
        return {"at": self.at, 3: (1, b"x")}

    def load_state_dict(self, state: dict) -> None:
        assert state[3] == (1, b"x")
        self.at = state["at"]


def plain_loader(num_workers: int = 0) -> DataLoader:
    """Shuffled by the global generator: what people have."""
    return DataLoader(range(14), batch_size=2, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]


def stateful_loader(num_workers: int = 0) -> DataLoader:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="the extra `data` is not installed")
    return torchdata.StatefulDataLoader(range(14), batch_size=2, shuffle=True, num_workers=num_workers)  # type: ignore[no-any-return]


def run(stream: Stream, num_windows: int, *, left: int = 0) -> list:
    """Decides windows, reads `left` microbatches of the next one, and is gone."""
    seen = []
    windows = stream.windows()
    for window in itertools.islice(windows, num_windows):
        seen.append([b.value.tolist() if isinstance(b.value, torch.Tensor) else b.value for b in window])
        stream.commit(window)
    if left:
        list(itertools.islice(next(windows), left))
    return seen


MAKERS = {
    "iterable": Items,
    "own state": Counting,
    "DataLoader": plain_loader,
    "DataLoader, 2 workers": lambda: plain_loader(2),
    "StatefulDataLoader": stateful_loader,
    "StatefulDataLoader, 2 workers": lambda: stateful_loader(2),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("cuts", [[3], [0, 1], [2, 2, 2], [7], [4, 3, 1]])
def test_a_resumed_stream_is_its_twin(maker, cuts: list[int]) -> None:  # type: ignore[no-untyped-def]
    """3 microbatches a window and 7 an epoch: cuts fall inside epochs, at their ends and twice in one of them."""
    torch.manual_seed(1)
    with Stream(maker(), microbatches_per_window=3, seed=5) as twin:
        whole = run(twin, 10)
    seen, state = [], None
    for number, decided in enumerate([*cuts, 10 - sum(cuts)]):
        torch.manual_seed(1 + number)  # the same only where the twin's loader was built, too
        random.seed(number)
        with Stream(maker(), microbatches_per_window=3, seed=5) as stream:
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
                assert stream.state_dict() == state
            seen += run(stream, decided, left=2)
            state = stream.state_dict()
    assert seen == whole


def test_each_epoch_is_announced_to_whoever_has_set_epoch() -> None:
    with Stream(Items(), microbatches_per_window=7) as stream:
        assert [values[0][0] for values in run(stream, 3)] == [0, 1, 2]
        state = stream.state_dict()
    with Stream(DataLoader(Items(), batch_size=None), microbatches_per_window=7) as loader:  # type: ignore[arg-type]
        assert [values[0][0] for values in run(loader, 3)] == [0, 1, 2]
    with Stream(Items(), microbatches_per_window=7) as resumed:
        resumed.load_state_dict(state)
        assert run(resumed, 1)[0][0][0] == 3


def test_each_source_says_what_it_can() -> None:
    assert Stream(Items()).guarantee is Guarantee.REPLAY
    assert Stream(Counting()).guarantee is Guarantee.SNAPSHOT
    assert Stream(Items(), max_replay=None).guarantee is Guarantee.BEST_EFFORT
    assert isinstance(Stream(Items()), DataSource) and as_source(stream := Stream([1])) is stream
    with pytest.raises(UsageError, match="int cannot be iterated"):
        Stream(3)


def test_reading_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    for num_workers in (0, 2):
        with Stream(plain_loader(num_workers), microbatches_per_window=3) as stream:
            run(stream, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_replay_is_announced_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with Stream(Items(100), microbatches_per_window=4) as stream:
        run(stream, 10)
        state = stream.state_dict()
    items = Items(100)
    with caplog.at_level(logging.WARNING, "samerun.data"), Stream(items, microbatches_per_window=4) as stream:
        stream.load_state_dict(state)
        run(stream, 0, left=1)
        assert stream.decision is not None and stream.decision.replayed == 40
        assert items.reads == 41
    assert "dropping 40 batches" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "samerun.data"), Stream(Items(100), microbatches_per_window=4) as stream:
        stream.load_state_dict(state)
        run(stream, 100)  # four more epochs: said once before and once after, and never again
    assert len(caplog.records) == 2
    with Stream(Items(100), microbatches_per_window=4, max_replay=39) as stream:
        stream.load_state_dict(state)
        with pytest.raises(UsageError, match=r"40 batches.*max_replay=39"):
            next(stream.windows())


def test_a_replay_never_reads_earlier_epochs() -> None:
    with Stream(Items(), microbatches_per_window=3) as stream:
        run(stream, 30)
        state = stream.state_dict()
    assert (state["epoch"], state["after"]) == (90 // 7, 90 % 7)


def test_a_source_with_state_replays_nothing() -> None:
    with Stream(Counting(), microbatches_per_window=3) as stream:
        run(stream, 4)
        state = stream.state_dict()
    fresh = Counting()
    with Stream(fresh, microbatches_per_window=3) as stream:
        stream.load_state_dict(state)
        run(stream, 1)
        assert fresh.reads == 3 and stream.decision is not None and stream.decision.replayed == 0


def test_rare_snapshots_are_followed_by_a_short_replay() -> None:
    with Stream(Counting(50), microbatches_per_window=2) as twin:
        whole = run(twin, 12)
    source = Counting(50)
    with Stream(source, microbatches_per_window=2, snapshot_every=4) as stream:
        first = run(stream, 6, left=1)
        state = stream.state_dict()
    assert source.states == 2 and state["after"] == 4
    with Stream(Counting(50), microbatches_per_window=2, snapshot_every=4) as stream:
        stream.load_state_dict(state)
        assert first + run(stream, 6) == whole


def test_best_effort_begins_anew_and_reads_nothing_again() -> None:
    with Stream(Items(), microbatches_per_window=2, max_replay=None) as stream:
        run(stream, 2)
        state = stream.state_dict()
    with Stream(Items(), microbatches_per_window=2, max_replay=None) as stream:
        stream.load_state_dict(state)
        assert [v[:2] for v in run(stream, 1)[0]] == [(0, 0), (0, 1)]
        assert stream.state_dict()["windows"] == 3


def test_a_shared_stream_is_exact_on_any_replicas() -> None:
    def attempt(count: int, state: dict | None, decided: int) -> tuple[dict, dict]:
        seen, states = {}, []
        for r in range(count):
            with Stream(Items(), microbatches_per_window=5, shared=True) as stream:
                stream.attach(Replica(index=r, count=count))
                if state is not None:
                    stream.load_state_dict(state)
                for window in itertools.islice(stream.windows(), decided):
                    assert (window.num_microbatches, window.slots) == (5, -(-5 // count))
                    seen |= {(window.index, b.number): b.value for b in window}
                    stream.commit(window)
                states.append(stream.state_dict())
        assert all(s == states[0] for s in states)
        return seen, states[0]

    whole, _ = attempt(1, None, 8)
    seen, state = {}, None
    for count in (4, 2, 3, 5):
        part, state = attempt(count, state, 2)
        seen |= part
    assert seen == whole and len(whole) == 40


def test_streams_of_their_own_get_their_own_position_back() -> None:
    def stream(index: int, count: int, **options: object) -> Stream:
        result = Stream(range(index, 1000, count), shared=False, microbatches_per_window=4, **options)  # type: ignore[arg-type]
        result.attach(Replica(index=index, count=count))
        return result

    states = []
    for r in range(2):
        one = stream(r, 2)
        assert run(one, 3) == [[r + 4 * w, r + 4 * w + 2] for w in range(3)]
        states.append(one.state_dict())
    again = stream(1, 2)
    again.load_state_dict(states[1])
    assert run(again, 1) == [[13, 15]]
    with pytest.raises(UsageError, match="replica 1 was given the position of replica 0"):
        stream(1, 2).load_state_dict(states[0])
    with pytest.raises(UsageError, match="2 streams of their own became 4"):
        stream(0, 4).load_state_dict(states[0])
    read, heard = set(range(12)), set()
    for r in range(4):
        grown = stream(r, 4, on_change="at-least-once")
        grown.load_state_dict(states[0])
        heard |= {value for values in run(grown, 2) for value in values}
    assert grown.decision is not None and grown.decision.repeated_at_most == 0
    assert heard == set(range(12, 20)) and not heard & read


def test_the_kind_of_sharing_is_never_guessed() -> None:
    with pytest.raises(UsageError, match=r"shared=True.*shared=False"):
        Stream(Items()).attach(Replica(index=0, count=2))
    with pytest.raises(UsageError, match=r"microbatches_per_window=3 is less than 4"):
        Stream(Items(), shared=True, microbatches_per_window=3).attach(Replica(index=0, count=4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"microbatches_per_window": 4}, "microbatches_per_window was 3 and is now 4"),
        ({"seed": 9}, "seed was 0 and is now 9"),
        ({"fingerprint": "v2"}, "fingerprint was '' and is now 'v2'"),
        ({"max_replay": None}, "another kind of source"),
    ],
)
def test_a_changed_stream_is_refused(change: dict, words: str) -> None:
    with Stream(Items(), microbatches_per_window=3) as stream:
        run(stream, 1)
        state = stream.state_dict()
    other = Stream(Items(), **({"microbatches_per_window": 3} | change))
    other.load_state_dict(state)
    with pytest.raises(UsageError, match=words):
        other.attach(Replica())


def test_a_changed_worker_count_is_refused_with_both_numbers() -> None:
    state = Stream(plain_loader(2)).state_dict()
    other = Stream(plain_loader(0))
    other.attach(Replica())
    with pytest.raises(UsageError, match="num_workers was 2 and is now 0"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "damage", [{"schema": "x"}, {"windows": -1}, {"after": 1.5}, {"replica": [2, 1]}, {"identity": 3}]
)
def test_a_damaged_state_is_refused(damage: dict) -> None:
    state = Stream(Items()).state_dict() | damage
    stream = Stream(Items())
    stream.attach(Replica())
    with pytest.raises(UsageError):
        stream.load_state_dict(state)


def test_state_after_iteration_began_is_refused() -> None:
    with Stream(Items()) as stream:
        state = stream.state_dict()
        next(stream.windows())
        with pytest.raises(UsageError, match="already iterated"):
            stream.load_state_dict(state)


def test_windows_are_committed_in_order_and_not_left_waiting() -> None:
    with Stream(Items()) as stream:
        windows = stream.windows()
        first, second = next(windows), next(windows)
        with pytest.raises(UsageError, match="next undecided window is 0"):
            stream.commit(second)
        list(first)
        stream.commit(first)
        with pytest.raises(UsageError, match="got window 0"):
            stream.commit(first)
    with Stream(Counting()) as stream, pytest.raises(UsageError, match="commit each window"):
        for window in stream.windows():
            list(window)


def test_what_a_decided_window_left_unread_does_not_come_later() -> None:
    with Stream(range(100), microbatches_per_window=4) as stream:
        windows = stream.windows()
        first = next(windows)
        next(iter(first))
        stream.commit(first)
        assert [b.value for b in next(windows)] == [4, 5, 6, 7]


def test_an_undecided_window_is_read_again() -> None:
    with Stream(range(100), microbatches_per_window=4) as stream:
        assert [b.value for b in next(stream.windows())] == [0, 1, 2, 3]
        assert [b.value for b in next(stream.windows())] == [0, 1, 2, 3]
    one_shot = Stream(iter(range(100)), microbatches_per_window=4)
    list(next(one_shot.windows()))
    with pytest.raises(UsageError, match="read already"):
        next(one_shot.windows())


def test_ends_of_streams_are_sentences() -> None:
    with (
        Stream(iter(range(5)), microbatches_per_window=2) as stream,
        pytest.raises(UsageError, match="ended after 5 items"),
    ):
        run(stream, 3)
    with (
        Stream([], microbatches_per_window=2) as stream,
        pytest.raises(UsageError, match="epoch 0 of the stream has no items"),
    ):
        run(stream, 1)


def test_samples_of_a_batch_are_counted() -> None:
    for batch, count in (
        (torch.zeros(3, 2), 3),
        ({"a": torch.zeros(4), "b": "text"}, 4),
        ((torch.zeros(5), 1), 5),
        ([1, 2], 2),
        (7, 1),
        (torch.tensor(1), 1),
    ):
        with Stream([batch]) as stream:
            assert [b.num_samples for b in next(stream.windows())] == [count]
    with Stream([5], num_samples=lambda value: value) as stream:
        assert [b.num_samples for b in next(stream.windows())] == [5]


def test_coverage_counts_each_microbatch_once() -> None:
    totals = {}
    for count in (1, 2, 3):
        total = 0
        for r in range(count):
            with Stream(Items(), microbatches_per_window=5, shared=True, device="cpu") as stream:
                stream.attach(Replica(index=r, count=count))
                window = next(stream.windows())
                total += sum(b.coverage for b in window)
        totals[count] = total % 2**64
        assert totals[count] == window.coverage
    assert len(set(totals.values())) == 1


SCRIPT = """
import torch
torch.set_num_threads(1)
from torch.utils.data import DataLoader
from samerun.data import Stream
loader = DataLoader(range(14), batch_size=2, num_workers=2, persistent_workers={persistent})
stream = Stream(loader, microbatches_per_window=3)
for window in stream.windows():
    for batch in window: pass
    stream.commit(window)
    if window.index == 3: raise SystemExit(75)
"""


@pytest.mark.parametrize("persistent", [False, True])
def test_a_process_that_never_closed_its_stream_still_ends(persistent: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(persistent=persistent)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 75 and "Error" not in done.stderr and "Warning" not in done.stderr


class Sharded(IterableDataset):
    """Each worker reads its own part, as iterable datasets do."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(info.id if info else 0, 12, info.num_workers if info else 1))


@pytest.mark.parametrize("make", ["plain", "stateful"])
def test_iterable_datasets_with_workers_resume(make: str) -> None:
    def loader() -> DataLoader:
        if make == "plain":
            return DataLoader(Sharded(), batch_size=2, num_workers=2)
        torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="the extra `data` is not installed")
        return torchdata.StatefulDataLoader(Sharded(), batch_size=2, num_workers=2)  # type: ignore[no-any-return]

    with Stream(loader(), microbatches_per_window=2) as twin:
        whole = run(twin, 6)
    with Stream(loader(), microbatches_per_window=2) as stream:
        first = run(stream, 2, left=1)
        state = stream.state_dict()
    with Stream(loader(), microbatches_per_window=2) as stream:
        stream.load_state_dict(state)
        assert first + run(stream, 4) == whole


def test_columns_that_a_dataloader_made_are_counted_by_their_rows() -> None:
    """torch's own collate function makes a list of columns from samples that are tuples: not two samples."""
    pairs = [(torch.zeros(3), number) for number in range(10)]
    words = [("a", "b")] * 10
    for samples, collate, counts in (
        (pairs, None, [4, 4, 2]),
        (words, None, [4, 4, 2]),
        ([{"x": ("a", "b"), "y": (1, 2)}] * 10, None, [4, 4, 2]),
        ([torch.zeros(3)] * 10, list, [4, 4, 2]),
        (["ab"] * 10, None, [4, 4, 2]),
        (pairs, list, [4, 4, 2]),
    ):
        loader = DataLoader(samples, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
        with Stream(loader, microbatches_per_window=3) as stream:
            assert [batch.num_samples for batch in next(stream.windows())] == counts, (samples[0], collate)


def test_a_loop_that_reads_ahead_of_its_commits_resumes_where_an_epoch_begins() -> None:
    """The window behind the committed one has begun the epoch, so the saved place is the epoch's beginning itself."""
    with Stream([[1], [2], [3], [4]], microbatches_per_window=2) as stream:
        windows = stream.windows()
        ahead = [next(windows) for _ in range(3)]
        for window in ahead:
            list(window)
        stream.commit(ahead[0])
        stream.commit(ahead[1])
        state = stream.state_dict()
    assert (state["epoch"], state["item"], state["after"]) == (1, 0, 0)
    with Stream([[1], [2], [3], [4]], microbatches_per_window=2) as stream:
        stream.load_state_dict(state)
        assert run(stream, 3) == [[[1], [2]], [[3], [4]], [[1], [2]]]
