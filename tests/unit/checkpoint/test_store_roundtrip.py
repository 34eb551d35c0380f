"""A save by N ranks loads on M ranks: the same bits, each element once, or a named error."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from samerun.checkpoint import Slices, Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Samples, Tokens, Updates, Windows
from samerun.errors import DamagedError, MismatchError, UsageError
from samerun.format.layout import Box, piece
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.state.fingerprint import fingerprint
from samerun.storage.local import Local
from samerun.storage.memory import Memory

PROGRESS = Progress(windows=Windows(9), updates=Updates(7), samples=Samples(63), tokens=Tokens(2**40))

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint4, torch.bits8,
]  # fmt: skip


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, also NaNs with payloads; bools hold 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(a, b)


def rows(tensor: torch.Tensor, pieces: int, index: int, axis: int = 0) -> Slices:
    """The piece of `tensor` that rank `index` of `pieces` holds when `axis` is cut as torch.chunk cuts it."""
    start, length = piece(tensor.shape[axis], pieces, index)
    offsets = tuple(start if d == axis else 0 for d in range(tensor.dim()))
    lengths = tuple(length if d == axis else n for d, n in enumerate(tensor.shape))
    part = tensor.narrow(axis, start, length).clone()
    return Slices(dtype=tensor.dtype, shape=tuple(tensor.shape), parts={Box(offsets, lengths): part})


def blank_like(slices: Slices) -> Slices:
    parts = {box: torch.zeros_like(part) for box, part in slices.parts.items()}
    return Slices(dtype=slices.dtype, shape=slices.shape, parts=parts)


def save_on(storage: Any, size: int, state: Any, **more: Any) -> None:
    def body(group: ThreadGroup) -> None:
        Store(storage, group=group).save(state(group), PROGRESS, facts={"from": size}, **more).result()

    run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, size: int) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (7, 13), (3, 0, 2), (2, 3, 5)]
    tensors = {
        f"{str(dtype).removeprefix('torch.')}.{i}": random_bits(shape, dtype, seed=i)
        for dtype, (i, shape) in itertools.product(DTYPES, enumerate(shapes))
    }

    def body(group: ThreadGroup) -> None:
        store = Store(tmp_path, group=group)
        entry = store.save({"weights": Captured(tensors=tensors)}, PROGRESS, facts={}).result()
        assert store.catalog().entries == (entry,)
        with store.open(entry) as checkpoint:
            source = checkpoint.source("weights")
            assert source.specs.keys() == tensors.keys()
            assert len(checkpoint.unconsumed()) == len(tensors)
            for key, tensor in tensors.items():
                assert source.specs[key].dtype == tensor.dtype
                target = random_bits(tuple(tensor.shape), tensor.dtype, seed=99)
                source.read_into(key, target)
                assert same_bits(target, tensor), key
            assert checkpoint.unconsumed() == []
            assert checkpoint.progress == PROGRESS

    run_ranks(size, body)


def test_shards_open_in_any_safetensors_reader_and_replicas_are_written_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = {f"w{i}": random_bits((7, 13), torch.bfloat16, seed=i) for i in range(5)}
    save_on(Local(tmp_path), 3, lambda group: {"weights": Captured(tensors=tensors)})
    seen: Counter[str] = Counter()
    for path in tmp_path.glob("checkpoints/*/*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                seen[name] += 1
                assert same_bits(file.get_tensor(name), tensors[name.removeprefix("weights/")])
    assert seen == Counter({f"weights/{key}": 1 for key in tensors})


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (1, 4), (4, 1), (4, 8), (8, 4), (3, 5), (2, 2)])
@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (1, 0)])
def test_resharding_fills_every_element_once(before: int, after: int, axes: tuple[int, int]) -> None:
    tensors = {f"t{n}.{m}": random_bits((n, m, 3), torch.float32, seed=n + m) for n in (1, 7, 13) for m in (2, 5, 13)}
    storage = Memory()
    save_on(
        storage,
        before,
        lambda group: {
            "weights": Captured(tensors={k: rows(t, before, group.rank, axes[0]) for k, t in tensors.items()})  # type: ignore[misc]
        },
    )

    def load(group: ThreadGroup) -> None:
        store = Store(storage, group=group)
        with store.open(store.catalog().entries[0]) as checkpoint:
            source = checkpoint.source("weights")
            for key, tensor in tensors.items():
                wanted = rows(tensor, after, group.rank, axes[1])
                target = blank_like(wanted)
                source.read_into(key, target)
                for box, part in wanted.parts.items():
                    assert same_bits(target.parts[box], part), (key, box)
                full = torch.zeros_like(tensor)
                source.read_into(key, full)
                assert same_bits(full, tensor)
            assert checkpoint.unconsumed() == []
            assert checkpoint.reads.read_bytes == checkpoint.reads.verified_bytes

    run_ranks(after, load)


def test_per_rank_state_is_kept_per_rank_and_shared_when_it_is_equal(tmp_path: Path) -> None:
    def state(group: ThreadGroup) -> dict[str, Captured]:
        return {
            "rng": Captured(
                plain={"draws": group.rank}, rank_tensors={"torch": torch.full((5,), group.rank, dtype=torch.uint8)}
            ),
            "scheduler": Captured(plain={"last": 3, 7: (1.0, float("inf"))}, rank_tensors={"t": torch.arange(3)}),
        }

    save_on(Local(tmp_path), 3, state)

    def same_world(group: ThreadGroup) -> None:
        store = Store(tmp_path, group=group)
        with store.open(store.catalog().entries[0]) as checkpoint:
            rng = checkpoint.source("rng")
            assert rng.plain == {"draws": group.rank}
            assert rng.plain_per_rank == [{"draws": rank} for rank in range(3)]
            target = torch.zeros(5, dtype=torch.uint8)
            rng.read_into("torch", target)
            assert target.tolist() == [group.rank] * 5
            scheduler = checkpoint.source("scheduler")
            assert scheduler.plain == {"last": 3, 7: (1.0, float("inf"))}
            assert scheduler.plain_per_rank is None
            assert checkpoint.unconsumed() == ["scheduler/t"]

    def other_world(group: ThreadGroup) -> None:
        store = Store(tmp_path, group=group)
        with store.open(store.catalog().entries[0]) as checkpoint:
            rng = checkpoint.source("rng")
            with pytest.raises(MismatchError, match="differs between the 3 ranks"):
                _ = rng.plain
            assert rng.plain_per_rank == [{"draws": rank} for rank in range(3)]
            assert rng.specs == {}
            with pytest.raises(MismatchError, match="no such tensor"):
                rng.read_into("torch", torch.zeros(5, dtype=torch.uint8))
            assert checkpoint.source("scheduler").plain == {"last": 3, 7: (1.0, float("inf"))}
            target = torch.zeros(3, dtype=torch.int64)
            checkpoint.source("scheduler").read_into("t", target)
            assert target.tolist() == [0, 1, 2]

    run_ranks(3, same_world)
    run_ranks(2, other_world)


@pytest.mark.parametrize("target", [torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4)])
def test_another_shape_or_dtype_is_refused_before_a_byte_is_read(target: torch.Tensor) -> None:
    storage = Memory()
    save_on(storage, 1, lambda group: {"weights": Captured(tensors={"w": torch.ones(4, 3)})})
    store = Store(storage)
    with store.open(store.catalog().entries[0]) as checkpoint:
        before = target.clone()
        with pytest.raises(MismatchError, match=r"weights/w: the checkpoint holds float32 \[4, 3\]"):
            checkpoint.source("weights").read_into("w", target)
        assert torch.equal(before, target)
        assert checkpoint.reads.read_bytes == 0


def test_a_flipped_byte_is_an_error_and_the_target_keeps_its_content() -> None:
    storage = Memory()
    save_on(storage, 1, lambda group: {"weights": Captured(tensors={"w": torch.ones(4, 3)})})
    key = next(key for key in storage.objects if key.endswith(".safetensors"))
    data = bytearray(storage.objects[key])
    data[-1] ^= 1
    storage.objects[key] = bytes(data)
    store = Store(storage)
    target = torch.zeros(4, 3)
    with store.open(store.catalog().entries[0]) as checkpoint:
        with pytest.raises(DamagedError, match=r"rank-00000\.safetensors: bytes 128 to 176 have"):
            checkpoint.source("weights").read_into("w", target)
        assert torch.equal(target, torch.zeros(4, 3))
        assert checkpoint.unconsumed() == ["weights/w"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda g: {"weights": Captured(tensors={"w": torch.ones(2 + g.rank)})}, "ranks must agree on a tensor"),
        (lambda g: {"weights": Captured(plain={"a": object()})}, r"weights\.a: builtins\.object is not plain"),
        (lambda g: {"weights": Captured(), **({"ema": Captured()} if g.rank else {})}, "did not capture"),
        (lambda g: {"weights": Captured(tensors={"w": rows(torch.ones(5), 3, g.rank)})}, "chunks hold 4 elements"),
        (lambda g: {"weights": Captured(tensors={"w": torch.ones(2).to_sparse()})}, "sparse"),
        (lambda g: {"weights": Captured(tensors={"w": torch.ones(2)}, rank_tensors={"w": torch.ones(2)})}, "two names"),
        (lambda g: {"we/ights": Captured()}, "component name"),
    ],
)
def test_what_cannot_be_saved_is_refused_alike_on_every_rank(state: Any, message: str) -> None:
    storage = Memory()
    raised: list[str] = []

    def body(group: ThreadGroup) -> None:
        store = Store(storage, group=group)
        store.open_attempt({})
        try:
            store.save(state(group), PROGRESS, facts={})
        except UsageError as error:
            raised.append(str(error))

    run_ranks(2, body)
    assert len(raised) == 2, raised
    assert all(re.search(message, text) for text in raised), raised
    assert not [key for key in storage.objects if key.startswith("checkpoints/")]


def test_a_failing_rank_fails_the_save_on_all_and_leaves_no_trace(tmp_path: Path) -> None:
    def body(group: ThreadGroup) -> Mapping[str, str]:
        def at(point: str) -> None:
            if group.rank == 1 and point == "save:shard":
                raise UsageError("rank 1 is out of luck")

        store = Store(tmp_path, group=group, at=at)
        tensors = {f"w{i}": torch.ones(64) for i in range(4)}
        pending = store.save({"weights": Captured(tensors=tensors)}, PROGRESS, facts={})
        assert not pending.is_durable
        with pytest.raises(UsageError, match="out of luck"):
            pending.result()
        return {}

    run_ranks(2, body)
    assert Store(tmp_path).catalog().entries == ()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_retention_keeps_the_newest_and_the_tagged() -> None:
    storage = Memory()
    store = Store(storage, keep_last=2)
    state = {"weights": Captured(tensors={"w": torch.ones(3)})}
    saved = [
        store.save(state, Progress(windows=Windows(i), updates=Updates(i)), facts={}, tags=["best"] if i == 1 else [])
        .result()
        .name
        for i in range(5)
    ]
    assert [entry.name for entry in store.catalog().entries] == [saved[4], saved[3], saved[1]]


def test_fingerprint_digests_come_back_per_rank() -> None:
    storage = Memory()

    def body(group: ThreadGroup) -> None:
        store = Store(storage, group=group)
        state = {"weights": Captured(tensors={"w": torch.ones(2)})}
        entry = store.save(state, PROGRESS, facts={}, digests={"weights": {"w": f"d{group.rank}"}}).result()
        assert store.open(entry).digests == {"weights": {"w": f"d{group.rank}"}}

    run_ranks(2, body)
    store = Store(storage)
    assert store.open(store.catalog().entries[0]).digests == {"weights": {"w": "d0"}}


def test_digests_are_those_of_all_that_a_rank_held_whoever_wrote_it() -> None:
    storage = Memory()

    def body(group: ThreadGroup) -> None:
        weights = {f"w{n}": torch.full((11,), float(n)) for n in range(4)}
        weights |= {"turned": torch.arange(6.0).reshape(2, 3).T, "bf": torch.ones(3).bfloat16()}
        weights |= {"scalar": torch.tensor(3), "empty": torch.zeros(0, 2)}
        own = {"alike": torch.arange(4), "own": torch.arange(5) * group.rank}
        state = {"weights": Captured(tensors=weights, plain={"lr": 0.5}), "rng": Captured(rank_tensors=own)}
        store = Store(storage, group=group)
        entry = store.save(state, PROGRESS, facts={}).result()
        assert store.open(entry).digests == {name: fingerprint(captured) for name, captured in state.items()}

    run_ranks(3, body)


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": object()}, {1: 2, "a": 3}, {"x": {1, 2}}])
def test_facts_that_are_no_json_are_refused_before_anything_is_written(facts: dict[Any, Any]) -> None:
    storage = Memory()
    store = Store(storage)
    store.open_attempt({})
    with pytest.raises(UsageError, match="facts must be JSON"):
        store.save({"weights": Captured()}, PROGRESS, facts=facts)
    assert storage.names("checkpoints") == []


def test_every_rank_gets_the_same_entry() -> None:
    storage = Memory()

    def body(group: ThreadGroup) -> Any:
        store = Store(storage, group=group)
        entry = store.save({"weights": Captured()}, PROGRESS, facts={"rank": group.rank}).result()
        assert store.catalog().entries == (entry,)
        return entry

    entries = run_ranks(3, body)
    assert entries == [entries[0]] * 3
    assert entries[0].facts == {"rank": 0}
