"""Checkpoints of the lessons: all of it comes back bitwise, nothing comes back half, every fault says its name."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samerun
from samerun import lessons
from samerun.checkpoint import Slices, Store
from samerun.checkpoint.catalog import read_catalog
from samerun.checkpoint.lookup import open_run
from samerun.checkpoint.verify import verify_checkpoint
from samerun.core.canonical import canonical_bytes
from samerun.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    NotFoundError,
    SchemaError,
    UnfinishedError,
    UsageError,
)
from samerun.format.layout import Box
from samerun.ranks.group import Solo


class Loop:
    """A loop by hand: dropout, BatchNorm, AdamW, a schedule; batches drawn from the global stream."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Dropout(0.3), nn.Linear(13, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            loss = (self.model(torch.randn(5, 7)) - 1).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    @property
    def objects(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        return self.model, self.optimizer, self.scheduler


def same(left: Any, right: Any) -> bool:
    """Equal leaf by leaf, bit by bit, and of the same types."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def only(path: Path) -> Path:
    """The directory of the one checkpoint."""
    (found,) = (path / "checkpoints").iterdir()
    return found


def test_a_loop_resumed_is_its_twin_bitwise(tmp_path: Path) -> None:
    twin = Loop(1).train(12)
    first = Loop(1)
    losses = first.train(5)
    lessons.save_checkpoint(*first.objects, {"step": 5, "batch_in_epoch": 2, "losses": losses}, tmp_path / "run")
    second = Loop(99)
    rest = lessons.load_checkpoint(tmp_path / "run", *second.objects)
    lessons.restore_rng_state(rest["rng"])
    assert (rest["schema"], rest["step"]) == (lessons.CHECKPOINT_SCHEMA, 5) == ("ckpt.v1", 5)
    assert rest["state"] == {"step": 5, "batch_in_epoch": 2, "losses": losses}
    assert losses + second.train(7) == twin


@pytest.mark.parametrize("forgotten", ["rng", "moments", "scheduler"])
def test_a_resume_that_forgets_something_is_not_the_twin(tmp_path: Path, forgotten: str) -> None:
    twin = Loop(1).train(12)
    first = Loop(1)
    losses = first.train(5)
    lessons.save_checkpoint(*first.objects, {"step": 5}, tmp_path / "run")
    second = Loop(99)
    rest = lessons.load_checkpoint(tmp_path / "run", *second.objects)
    if forgotten != "rng":
        lessons.restore_rng_state(rest["rng"])
    if forgotten == "moments":
        second.optimizer.state.clear()
    if forgotten == "scheduler":
        second.optimizer.param_groups[0]["lr"] = 1e-2
    assert losses + second.train(7) != twin


PAYLOAD: dict[str, Any] = {
    "weights": {"a": torch.arange(6.0).reshape(2, 3), "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)},
    "counters": {"step": 7, "loss": math.inf, "last": math.nan, "seen": (1, 2), "raw": b"\x00\xff"},
    "milestones": {3: 1, 7: 1},
    "array": np.arange(4, dtype=np.int16),
    "alone": torch.zeros(0, 3),
    "list": [torch.ones(1), {"deep": [None, True, "x"]}],
    "counter": Counter({3: 2}),
    "number": 5,
}


def test_a_payload_comes_back_as_it_was(tmp_path: Path) -> None:
    lessons.atomic_save(PAYLOAD, tmp_path / "run", step=7)
    back = lessons.load_checkpoint(tmp_path / "run")
    for name, value in PAYLOAD.items():
        assert same(back[name], value), name
    assert not same(back["weights"], {**PAYLOAD["weights"], "half": torch.tensor([1.5, 0.0], dtype=torch.bfloat16)})


def test_tied_weights_come_back_under_both_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lessons.save_checkpoint(model, optimizer, None, {"step": 1}, tmp_path / "run")
    weights = lessons.load_checkpoint(tmp_path / "run")["weights"]
    assert same(weights["head.weight"], weights["embed.weight"])
    assert set(weights) == {"head.weight", "embed.weight"}


def test_what_code_would_have_to_bring_back_is_refused_by_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.b"):
        lessons.atomic_save({"x": {"a": {"b": object()}}}, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing was touched"


@pytest.mark.parametrize("step", [-1, 1.5, True])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="step="):
        lessons.atomic_save({"x": 1}, tmp_path / "run", step=step)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.ckpt"])
def test_a_file_name_is_refused_with_a_directory_to_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"write a directory, like .*model$"):
        lessons.atomic_save({"x": 1}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from samerun.storage.local import Local

    run = tmp_path / "run"
    lessons.atomic_save({"x": torch.ones(3)}, run, step=1)
    real = Local.writer

    def full_disk(self: Local, key: str) -> Any:
        if key.endswith("manifest.json"):
            raise OSError(28, "No space left on device")
        return real(self, key)

    monkeypatch.setattr(Local, "writer", full_disk)
    with pytest.raises(OSError, match="No space left"):
        lessons.atomic_save({"x": torch.zeros(3)}, run, step=2)
    monkeypatch.undo()
    assert same(lessons.load_checkpoint(run)["x"], torch.ones(3))


def test_saving_never_removes_and_rotating_keeps_the_last_and_the_tagged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = [lessons.atomic_save({"x": step}, run, step=step).name for step in range(8)]
    store = Store(run)
    assert [entry.name for entry in store.catalog().entries] == saved[::-1]
    store.tag("best", store.catalog().entries[-1])
    assert lessons.rotate_checkpoints(run) == tuple(saved[1:3]), "the last 5 by default"
    assert lessons.rotate_checkpoints(run, keep_last=2) == tuple(saved[3:6])
    assert {entry.name for entry in store.catalog().entries} == {saved[0], *saved[6:]}
    assert lessons.rotate_checkpoints(run, keep_last=2) == ()
    with pytest.raises(UsageError, match="at least one"):
        lessons.rotate_checkpoints(run, keep_last=0)


def test_rotating_never_removes_the_newest_sound_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = [lessons.atomic_save({"x": torch.arange(4)}, run, step=step).name for step in range(3)]
    flip(run / "checkpoints" / saved[2] / "rank-00000.safetensors")
    assert lessons.rotate_checkpoints(run, keep_last=1) == (saved[0],)
    flip(run / "checkpoints" / saved[1] / "rank-00000.safetensors")
    with pytest.raises(DamagedError, match="nothing is removed"):
        lessons.rotate_checkpoints(run, keep_last=1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_step_back_is_newest_when_it_was_saved_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 5):
        lessons.atomic_save({"x": step}, run, step=step)
    assert lessons.load_checkpoint(run)["step"] == 5


def test_a_run_of_samerun_is_read_and_not_written_into(tmp_path: Path) -> None:
    loop = Loop(1)
    data = samerun.Data(torch.utils.data.TensorDataset(torch.randn(8, 7)), global_batch=4, micro_batch=2, seed=1)
    objects = {"model": loop.model, "optimizer": loop.optimizer, "scheduler": loop.scheduler}
    with samerun.Run(tmp_path / "run", data=data, save_every="1 updates", **objects) as run:
        for window in run.windows(until=2):
            for (batch,) in window:
                window.backward(loop.model(batch).square().sum(), len(batch))
            window.step()
    other = Loop(99)
    rest = lessons.load_checkpoint(tmp_path / "run", *other.objects)
    assert same(other.model.state_dict()["0.weight"], loop.model.state_dict()["0.weight"])
    assert {"cursor", "samples", "rng"} <= set(rest)
    with pytest.raises(UsageError, match=r"holds a run of samerun\.Run"):
        lessons.save_checkpoint(*loop.objects, {"step": 3}, tmp_path / "run")
    with pytest.raises(UsageError, match="is a checkpoint by itself"):
        lessons.atomic_save({"x": 1}, next((tmp_path / "run" / "checkpoints").iterdir()))


def test_run_and_warm_start_know_what_such_a_path_is(tmp_path: Path) -> None:
    loop = Loop(1)
    lessons.save_checkpoint(*loop.objects, {"step": 3}, tmp_path / "by-hand")
    data = samerun.Data(torch.utils.data.TensorDataset(torch.randn(8, 7)), global_batch=4, micro_batch=2, seed=1)
    with (
        pytest.raises(SystemExit) as refused,
        samerun.Run(tmp_path / "by-hand", model=loop.model, optimizer=loop.optimizer, data=data),
    ):
        pass
    assert refused.value.code == 4
    other = Loop(99)
    samerun.warm_start(tmp_path / "by-hand", model=other.model)
    assert same(dict(other.model.state_dict()), dict(loop.model.state_dict()))


def test_moments_without_an_optimizer_are_an_error(tmp_path: Path) -> None:
    loop = Loop(1)
    loop.train(1)
    lessons.save_checkpoint(*loop.objects, {"step": 1}, tmp_path / "run")
    with pytest.raises(MismatchError, match="moments, steps, and no optimizer"):
        lessons.load_checkpoint(tmp_path / "run", loop.model)
    with pytest.raises(UsageError, match="scheduler without its optimizer"):
        lessons.load_checkpoint(tmp_path / "run", loop.model, None, loop.scheduler)
    other = nn.Linear(2, 2)
    with pytest.raises(MismatchError, match=r"0\.weight"):
        lessons.load_checkpoint(tmp_path / "run", other, torch.optim.SGD(other.parameters()))
    with pytest.raises(UsageError, match="no model given here owns"):
        lessons.load_checkpoint(tmp_path / "run", other, torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_a_pt_file_is_read_weights_only(tmp_path: Path) -> None:
    loop = Loop(1)
    loop.train(2)
    state = {"model": loop.model.state_dict(), "opt": loop.optimizer.state_dict(), "step": 120}
    torch.save(state, tmp_path / "ckpt.pt")
    other = Loop(99)
    rest = lessons.load_checkpoint(tmp_path / "ckpt.pt", other.model, other.optimizer)
    assert rest == {"step": 120}
    assert same(dict(other.model.state_dict()), dict(loop.model.state_dict()))
    assert same(other.optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"])
    assert set(lessons.load_checkpoint(tmp_path / "ckpt.pt")) == {"model", "opt", "step"}
    with pytest.raises(MismatchError, match="has no 'scheduler', only model, opt, step"):
        lessons.load_checkpoint(tmp_path / "ckpt.pt", other.model, other.optimizer, other.scheduler)
    with pytest.raises(MismatchError, match="model does not fit"):
        lessons.load_checkpoint(tmp_path / "ckpt.pt", nn.Linear(2, 2))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/samerun-lessons-evil"),))


def test_a_pt_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(DamagedError, match="without running its code"):
        lessons.load_checkpoint(tmp_path / "evil.pt")
    assert not Path("/tmp/samerun-lessons-evil").exists()
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(SchemaError, match="holds a list"):
        lessons.load_checkpoint(tmp_path / "list.pt")
    torch.save({"schema": "mine.v3"}, tmp_path / "mine.pt")
    with pytest.raises(SchemaError, match=r"unknown schema 'mine\.v3'"):
        lessons.load_checkpoint(tmp_path / "mine.pt")


@pytest.mark.parametrize("load", [lessons.load_checkpoint, lambda path: lessons.load_sharded(path, 1)])
def test_nothing_there_is_said(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        load(tmp_path / "nowhere")
    lessons.atomic_save({"x": 1}, tmp_path / "run")
    (only(tmp_path / "run") / "manifest.json").unlink()
    with pytest.raises(UnfinishedError, match="no complete checkpoint"):
        load(tmp_path / "run")


def test_on_several_ranks_the_lessons_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(UsageError, match=r"there are 4 ranks; use samerun\.Run"):
        lessons.atomic_save({"x": 1}, tmp_path / "run")


STATES = [
    {"weight": torch.arange(5.0) + rank, "moments": {"m": torch.full((2,), 0.1 * rank)}, "rank": rank}
    for rank in range(4)
]


def saved_by_four(folder: Path) -> Path:
    lessons.save_sharded(STATES, folder, 10)
    return folder


def test_four_shards_and_a_manifest_reload_byte_for_byte(tmp_path: Path) -> None:
    entry, states = lessons.load_sharded(saved_by_four(tmp_path / "run"), 4)
    assert same(states, STATES)
    assert (entry.world_size, int(entry.progress.updates)) == (4, 10)
    names = sorted(file.name for file in only(tmp_path / "run").iterdir())
    shards = [f"rank-0000{rank}.safetensors" for rank in range(4)]
    assert names == sorted(["manifest.json", *shards, *(name.replace("safetensors", "json") for name in shards)])
    storage = open_run(tmp_path / "run")
    assert verify_checkpoint(storage, entry.name).problems == ()
    assert same(lessons.load_sharded(only(tmp_path / "run"), 4)[1], STATES), "one checkpoint by itself"


def edit_manifest(checkpoint: Path, **fields: Any) -> None:
    """Re-sealed: what its author says, with a right digest of itself."""
    from samerun.format.sealed import seal

    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest.pop("self_sha256", None)
    (checkpoint / "manifest.json").write_bytes(seal({**manifest, **fields}))


SHARD = "rank-00002.safetensors"
FAULTS: dict[str, tuple[Callable[[Path], Any], type[CheckpointError], str]] = {
    "digest": (lambda folder: flip(folder / SHARD), DamagedError, rf"{SHARD}: SHA-256 is \w+, the manifest says"),
    "missing shard": (lambda folder: (folder / SHARD).unlink(), DamagedError, rf"{SHARD}: missing"),
    "partial shard": (
        lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-8]),
        DamagedError,
        rf"{SHARD}: \d+ bytes, the manifest says \d+; the file was cut",
    ),
    "unknown schema": (
        lambda folder: edit_manifest(folder, schema="ckpt.v9"), SchemaError, r"unknown schema 'ckpt\.v9'",
    ),
    "not a ckpt": (lambda folder: edit_manifest(folder, schema="zip.v1"), SchemaError, r"'zip\.v1'"),
    "index": (
        lambda folder: (folder / "rank-00001.json").write_bytes(canonical_bytes({})), DamagedError, "rank-00001.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_load_has_an_error_of_its_own(tmp_path: Path, fault: str) -> None:
    spoil, kind, words = FAULTS[fault]
    spoil(only(saved_by_four(tmp_path / "run")))
    for path in (tmp_path / "run", only(tmp_path / "run")):
        with pytest.raises(kind, match=words):
            lessons.load_sharded(path, 4)


def test_another_world_size_is_an_error_unless_resharding(tmp_path: Path) -> None:
    run = saved_by_four(tmp_path / "run")
    for size in (2, 8):
        with pytest.raises(MismatchError, match=rf"world size: 4 ranks saved it, {size} are to load it"):
            lessons.load_sharded(run, size)
        with pytest.raises(MismatchError, match="each has its own weight, moments, rank"):
            lessons.load_sharded(run, size, reshard=True)


def slices(value: torch.Tensor, num_ranks: int) -> list[dict[str, Any]]:
    starts = [0]
    for part in value.chunk(num_ranks):
        starts.append(starts[-1] + len(part))
    return [
        {
            "w": Slices(
                dtype=value.dtype,
                shape=tuple(value.shape),
                parts={Box((start, 0), (end - start, value.shape[1])): value[start:end]},
            ),
            "lr": 0.5,
        }
        for start, end in pairwise(starts)
    ]


def joined(states: list[dict[str, Any]]) -> torch.Tensor:
    found = torch.full(states[0]["w"].shape, math.nan)
    for state in states:
        for box, part in state["w"].parts.items():
            target = found[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
            assert torch.isnan(target).all(), "no element twice"
            target.copy_(part)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 13, 16])
def test_global_tensors_are_cut_anew(tmp_path: Path, size: int) -> None:
    value = torch.arange(13.0 * 3).reshape(13, 3)
    lessons.save_sharded(slices(value, 4), tmp_path / "run", 10)
    _, states = lessons.load_sharded(tmp_path / "run", size, reshard=True)
    assert len(states) == size
    assert torch.equal(joined(states), value)
    assert [list(state["w"].parts) for state in states[: len(value.chunk(size))]] == [
        list(state["w"].parts) for state in slices(value, size)
    ], "the rule of torch.chunk"
    assert {state["lr"] for state in states} == {0.5}, "what all ranks held alike goes to all"


def test_gaps_and_overlaps_are_refused_before_anything_is_published(tmp_path: Path) -> None:
    states = slices(torch.arange(12.0).reshape(4, 3), 4)
    gap = [states[0], states[1], {"lr": 0.5}, states[3]]
    overlap = [states[0], states[1], states[2], {**states[3], "w": slices(torch.zeros(4, 3), 2)[1]["w"]}]
    for wrong in (gap, overlap):
        with pytest.raises(UsageError, match="each element once"):
            lessons.save_sharded(wrong, tmp_path / "run", 10)
        assert read_catalog(open_run(tmp_path / "run")).entries == ()
    with pytest.raises(UsageError, match="empty"):
        lessons.save_sharded([], tmp_path / "run", 10)


def test_a_damaged_newest_is_raised_and_nothing_older_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    old, new = (lessons.atomic_save({"x": torch.full((4,), float(step))}, run, step=step).name for step in (1, 2))
    shard = run / "checkpoints" / new / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=new):
        lessons.load_checkpoint(run)
    (run / "latest.json").unlink()  # without the hint it is refused all the same
    with pytest.raises(DamagedError, match=new):
        lessons.load_checkpoint(run)
    assert lessons.load_checkpoint(run / "checkpoints" / old)["step"] == 1, "the way on is to name the older one"
    shutil.rmtree(run / "checkpoints" / new)
    assert lessons.load_checkpoint(run)["step"] == 1


def test_a_damaged_file_touches_no_object(tmp_path: Path) -> None:
    """Large enough for several blocks: read block by block, sound weights would come before the damaged moments."""
    model = nn.Linear(1100, 1100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1100)).sum().backward()
    optimizer.step()
    lessons.save_checkpoint(model, optimizer, None, {"step": 1}, tmp_path / "run")
    shard = only(tmp_path / "run") / "rank-00000.safetensors"
    sound = shard.read_bytes()
    for place in (-1, len(sound) // 2, 4096):
        data = bytearray(sound)
        data[place] ^= 1
        shard.write_bytes(data)
        other = nn.Linear(1100, 1100, bias=False)
        before = other.weight.detach().clone()
        with pytest.raises(DamagedError, match="SHA-256"):
            lessons.load_checkpoint(tmp_path / "run", other, torch.optim.AdamW(other.parameters()))
        assert torch.equal(other.weight, before)


def test_a_store_with_a_group_is_what_the_shards_are(tmp_path: Path) -> None:
    """The same checkpoint as any other: opened by the store, not only by the function that wrote it."""
    saved_by_four(tmp_path / "run")
    store = Store(tmp_path / "run", group=Solo())
    with store.open(store.catalog().entries[0]) as checkpoint:
        assert checkpoint.world_size == 4
        assert checkpoint.components == ("rank_state",)
