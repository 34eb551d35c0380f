import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samerun.data import Data, PackedDocuments, Replica
from samerun.data.order import Order
from samerun.errors import UsageError

LENGTHS = [5, 0, 1, 12, 3, 7, 30, 2]


def documents(lengths: list[int]) -> list[list[int]]:
    """Token = 1000·document + place, so that each token says where it is from."""
    return [[1000 * d + i for i in range(n)] for d, n in enumerate(lengths)]


def line(lengths: list[int], seed: int, epoch: int) -> list[int]:
    """The oracle: concatenate everything."""
    order = Order(num_samples=len(lengths), seed=seed).lookup(np.full(len(lengths), epoch), np.arange(len(lengths)))
    return [token for d in order.tolist() for token in documents(lengths)[d]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 11), st.integers(0, 3), st.integers(0, 2))
def test_sequences_are_the_concatenation_cut(lengths: list[int], size: int, seed: int, epoch: int) -> None:
    tokens = line(lengths, seed, epoch)
    if len(tokens) < size + 1:
        with pytest.raises(UsageError, match="do not fill one sequence"):
            PackedDocuments(documents(lengths), lengths, sequence_length=size, seed=seed)
        return
    packed = PackedDocuments(documents(lengths), lengths, sequence_length=size, seed=seed)
    assert len(packed) == (len(tokens) - 1) // size
    for j in range(len(packed)):
        item = packed.sample_of(epoch, j)
        assert item["tokens"].tolist() == tokens[j * size : j * size + size + 1]
        starts = [t // 1000 for t in item["tokens"].tolist()]
        numbers = [sum(1 for a, b in itertools.pairwise(starts[: i + 1]) if a != b) for i in range(len(starts))]
        assert item["document"].tolist() == numbers


def test_every_token_but_the_tail_is_a_target_once_in_each_epoch_on_any_ranks() -> None:
    packed = PackedDocuments(documents(LENGTHS), LENGTHS, sequence_length=4, seed=3)
    assert packed.tokens_per_epoch == 60 and len(packed) == 14
    targets: dict[int, list[int]] = {}
    state = None
    for count, decided in ((1, 2), (2, 3), (3, 2)):
        states = []
        for r in range(count):
            with Data(packed, global_batch=6, micro_batch=2, seed=1) as data:
                data.attach(Replica(index=r, count=count))
                if state is not None:
                    data.load_state_dict(state)
                for window in itertools.islice(data.windows(), decided):
                    for batch in window:
                        for (epoch, _), tokens in zip(batch.samples, batch.value["tokens"], strict=True):
                            targets.setdefault(epoch, []).extend(tokens[1:].tolist())
                    data.commit(window)
                states.append(data.state_dict())
        state = states[0]
        assert "tokens" not in json.dumps(state) and len(json.dumps(state)) < 1024
    for epoch in range(3):
        assert sorted(targets[epoch]) == sorted(line(LENGTHS, 3, epoch)[1 : 14 * 4 + 1])
    assert line(LENGTHS, 3, 0) != line(LENGTHS, 3, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_pack_alike(num_workers: int) -> None:
    packed = PackedDocuments(documents(LENGTHS), LENGTHS, sequence_length=4)
    with (
        Data(packed, global_batch=4, micro_batch=2, num_workers=num_workers) as one,
        Data(packed, global_batch=4, micro_batch=2) as two,
    ):
        for first, second in itertools.islice(zip(one.windows(), two.windows(), strict=False), 8):
            for a, b in zip(first, second, strict=True):
                assert torch.equal(a.value["tokens"], b.value["tokens"])


def test_a_far_sequence_reads_only_its_own_documents() -> None:
    class Documents(list):  # type: ignore[type-arg]
        def __getitem__(self, d: int) -> list[int]:  # type: ignore[override]
            reads.append(d)
            return [d] * 10

    reads: list[int] = []
    packed = PackedDocuments(Documents(range(10_000)), [10] * 10_000, sequence_length=16)
    packed.sample_of(5, 6_000)
    assert len(reads) == 2


def test_byte_documents_and_plain_indexing() -> None:
    packed = PackedDocuments([b"hello ", b"world"], [6, 5], sequence_length=10)
    text = bytes(packed[0]["tokens"].tolist())
    assert text in (b"hello world", b"worldhello ")
    with pytest.raises(IndexError):
        packed[1]


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="2 documents"):
        PackedDocuments([[1], [2]], [1], sequence_length=1)
    with pytest.raises(UsageError, match="sequence_length=0"):
        PackedDocuments([[1], [2]], [1, 1], sequence_length=0)
    packed = PackedDocuments([[1, 2, 3], [4, 5]], [3, 3], sequence_length=5)
    with pytest.raises(UsageError, match=r"document 1 has 2 tokens, 3 were said"):
        packed[0]


def test_other_lengths_are_another_dataset() -> None:
    def fingerprint(lengths: list[int], size: int = 2) -> str:
        return PackedDocuments(documents(lengths), lengths, sequence_length=size).fingerprint

    assert len({fingerprint([3, 4]), fingerprint([4, 3]), fingerprint([3, 4], 3)}) == 3
    with (
        Data(PackedDocuments(documents([3, 4]), [3, 4], sequence_length=2), global_batch=2, micro_batch=1) as one,
        Data(PackedDocuments(documents([4, 3]), [4, 3], sequence_length=2), global_batch=2, micro_batch=1) as two,
        pytest.raises(UsageError, match="fingerprint was"),
    ):
        two.load_state_dict(one.state_dict())


def test_lengths_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="float64 numbers; give whole ones"):
        PackedDocuments([[1, 2]], [1.7], sequence_length=1)
