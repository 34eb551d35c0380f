"""Hugging Face datasets, map-style and iterable, when the extra `data` is installed."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from samerun.data import Data, Guarantee, Stream
from samerun.errors import UsageError

datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")


def table(version: str = "v1") -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    rows = datasets.table.InMemoryTable(pyarrow.table({"x": list(range(20))}))
    return datasets.Dataset(rows, fingerprint=version)


def rows_of(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": 5 * shard + i} for i in range(5))


def streaming(*, shuffled: bool = False) -> Any:
    stream = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": [0, 1, 2, 3]})
    return stream.shuffle(seed=3, buffer_size=6) if shuffled else stream


def run(source: Any, state: dict | None, decided: int) -> tuple[list, dict]:
    with source:
        if state is not None:
            source.load_state_dict(json.loads(json.dumps(state)))
        seen = []
        for window in itertools.islice(source.windows(), decided):
            seen += [batch.value for batch in window]
            source.commit(window)
        return seen, source.state_dict()


def test_a_map_style_dataset_is_exact_and_its_fingerprint_counts() -> None:
    def collate(rows: list[dict]) -> list[int]:
        return [row["x"] for row in rows]

    def make(data: Any) -> Data:
        return Data(data, global_batch=6, micro_batch=2, seed=1, collate_fn=collate)

    first, state = run(make(table()), None, 2)
    assert first + run(make(table()), state, 3)[0] == run(make(table()), None, 5)[0]
    with pytest.raises(UsageError, match="fingerprint was"):
        make(table("v2")).load_state_dict(state)


def cut_three_times(make: Callable[[], Stream]) -> list[Any]:
    """Fifteen windows, resumed in a fresh source after 2, 3 and 8."""
    seen, state = run(make(), None, 2)
    for decided in (1, 5, 7):
        part, state = run(make(), state, decided)
        seen += part
    return seen


@pytest.mark.parametrize("shuffled", [False, True])
def test_an_iterable_dataset_resumes_and_a_shuffle_buffer_is_replayed(shuffled: bool) -> None:
    def make() -> Stream:
        return Stream(streaming(shuffled=shuffled), microbatches_per_window=3)

    assert make().guarantee is (Guarantee.REPLAY if shuffled else Guarantee.SNAPSHOT)
    assert cut_three_times(make) == run(make(), None, 15)[0]
    with pytest.raises(UsageError, match="Stream"):
        Data(streaming(), global_batch=2, micro_batch=1)


@pytest.mark.parametrize("join", ["interleave_datasets", "concatenate_datasets"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_shuffle_buffer_inside_joined_datasets_is_replayed_too(join: str, shuffled: bool) -> None:
    def make() -> Stream:
        return Stream(getattr(datasets, join)([streaming(), streaming(shuffled=shuffled)]), microbatches_per_window=3)

    assert make().guarantee is (Guarantee.REPLAY if shuffled else Guarantee.SNAPSHOT)
    assert cut_three_times(make) == run(make(), None, 15)[0]
