"""Each way in which stock DCP loses or keeps the wrong thing in silence: stock as the control, ours beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AbstractSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

from samerun.dcp import LoadPlanner, Reader, SavePlanner, Writer, real_errors
from samerun.errors import AlreadyExistsError, CheckpointError, DamagedError, MismatchError, StorageError, UsageError
from samerun.storage.faulty import FaultyFiles
from samerun.storage.local import Local
from unit.dcp.dcp_states import edit_manifest, flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def forget_cached_plans() -> Iterator[None]:
    """DCP keeps plans in class attributes, for the whole process."""
    yield
    for name in (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        getattr(AbstractSavePlanner, name).clear()


def save(state: dict[str, Any], path: Any, planner: Any = None) -> Any:
    with real_errors():
        return dcp.save(state, storage_writer=Writer(path), planner=planner or SavePlanner())


def load(state: dict[str, Any], path: Any, planner: Any = None) -> None:
    with real_errors():
        dcp.load(state, storage_reader=Reader(path), planner=planner or LoadPlanner())


# --- failures while writing


class OneByOne(filesystem.FileSystem):
    """A disk that fails under the second writer thread."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "Input/output error")
        with super().create_stream(path, mode) as stream:
            yield stream


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_stock_publishes_although_a_worker_failed(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False, thread_count=2)
    writer.fs = OneByOne()
    dcp.save({"a": torch.ones(3), "b": torch.ones(3)}, storage_writer=writer)
    assert (tmp_path / ".metadata").exists()
    with pytest.raises(CheckpointException):
        dcp.load({"a": torch.ones(3), "b": torch.ones(3)}, checkpoint_id=tmp_path)


def num_operations(tmp_path: Path, state: dict[str, Any]) -> int:
    files = FaultyFiles(at=None, error_number=0)
    save(state, Local(tmp_path / "count", files=files))
    return files.num_operations


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failure_at_any_operation_is_raised_and_nothing_is_published(tmp_path: Path, number: int) -> None:
    state = {"a": torch.ones(3), "n": 1}
    total = num_operations(tmp_path, state)
    assert total > 15
    for at in range(total):
        path = tmp_path / str(at)
        files = FaultyFiles(at=at, error_number=number, lasting=True)
        try:
            save(state, Local(path, files=files))
        except StorageError as error:
            assert error.errno == number
            with pytest.raises(CheckpointError, match="no manifest") if not _published(path) else _nothing():
                load({"a": torch.zeros(3), "n": 0}, path)
        else:
            # only removing the claim may fail unseen: everything had been published then
            live = {"a": torch.zeros(3), "n": 0}
            load(live, path)
            assert torch.equal(live["a"], torch.ones(3))


def _published(path: Path) -> bool:
    """A failure after the manifest's rename (of the directory's fsync) leaves a complete checkpoint."""
    return (path / "manifest.json").exists()


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_the_same_writer_may_try_again_after_a_failure(tmp_path: Path) -> None:
    state = {"a": torch.ones(3)}
    files = FaultyFiles(at=12, error_number=errno.ENOSPC)
    writer = Writer(Local(tmp_path / "a", files=files))
    with pytest.raises(StorageError), real_errors():
        dcp.save(state, storage_writer=writer)
    assert files.failed and list((tmp_path / "a").iterdir())
    with pytest.raises(AlreadyExistsError, match="never finished"):
        save(state, tmp_path / "a")
    with real_errors():
        dcp.save(state, storage_writer=writer)
    load({"a": torch.zeros(3)}, tmp_path / "a")


# --- results and plan


class Dropping(Writer):
    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        future.value().remove(next(r for r in future.value() if r.index.fqn == "b"))
        return future


def test_results_must_cover_the_plan(tmp_path: Path) -> None:
    for state in ({"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.ones(3), "b": 7}):
        with pytest.raises(DamagedError, match=r"b: planned.*(written none|no rank wrote it)"), real_errors():
            dcp.save(state, storage_writer=Dropping(tmp_path / "a"))
        assert not list((tmp_path / "a").iterdir())


class Silent(Writer):
    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        future.value().clear()
        return future


def test_a_rank_that_reports_nothing_is_no_rank_that_wrote(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="rank 0 did not report"), real_errors():
        dcp.save({"a": torch.ones(3)}, storage_writer=Silent(tmp_path / "a"))


class Twice(Writer):
    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        future.value().append(next(r for r in future.value() if r.index.fqn == "a"))
        return future


def test_a_chunk_that_is_reported_twice_is_refused(tmp_path: Path) -> None:
    for value in (torch.ones(3), 5):
        with pytest.raises(DamagedError, match=r"^a: "), real_errors():
            dcp.save({"a": value}, storage_writer=Twice(tmp_path / "a"))


class InTwo(DefaultSavePlanner):
    """Two chunks of every tensor of the key `w` on this one rank; `gap` leaves a row out."""

    gap = 0

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            assert item.tensor_data is not None
            rows, columns = item.tensor_data.size
            for first, count in ((0, 3 - self.gap), (3, rows - 3)):
                chunk = ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((count, columns)))
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = MetadataIndex(item.index.fqn, (first, 0))
                items.append(dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data))
        return dataclasses.replace(plan, items=items)

    def resolve_data(self, write_item: Any) -> Any:
        chunk = write_item.tensor_data.chunk
        first, count = chunk.offsets[0], chunk.sizes[0]
        return self.state_dict[write_item.index.fqn][first : first + count]


class InTwoWithGap(InTwo):
    gap = 1


W = torch.arange(14.0).reshape(7, 2)


def test_stock_safetensors_keep_one_of_two_chunks(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save({"w": W}, storage_writer=writer, planner=InTwo())
    (file,) = tmp_path.rglob("*.safetensors")
    assert load_file(file)["w"].shape == (4, 2)


def test_two_chunks_of_one_key_on_one_rank_both_stay(tmp_path: Path) -> None:
    save({"w": W}, tmp_path / "a", InTwo())
    live = {"w": torch.zeros(7, 2)}
    load(live, tmp_path / "a")
    assert torch.equal(live["w"], W)


def test_stock_saves_a_tensor_with_a_gap_and_loads_old_rows(tmp_path: Path) -> None:
    dcp.save({"w": W}, checkpoint_id=tmp_path, planner=InTwoWithGap())
    live = {"w": torch.full((7, 2), -1.0)}
    dcp.load(live, checkpoint_id=tmp_path)
    assert torch.equal(live["w"][2], torch.tensor([-1.0, -1.0]))


def test_a_tensor_with_a_gap_is_never_published(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"w: chunks hold 12 elements, the tensor of shape .7, 2. 14"):
        save({"w": W}, tmp_path / "a", InTwoWithGap())
    with pytest.raises(CheckpointError, match="no manifest"):
        load({"w": torch.zeros(7, 2)}, tmp_path / "a")


# --- overwriting


def test_stock_overwrites_in_place_and_a_crash_mixes_two_saves(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    dcp.save({"a": torch.ones(3), "b": torch.ones(3)}, storage_writer=writer)
    newer = tmp_path.parent / "newer"
    dcp.save(
        {"a": torch.full((3,), 2.0), "b": torch.full((3,), 2.0)},
        storage_writer=dcp.FileSystemWriter(newer, single_file_per_rank=False),
    )
    (newer / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")  # the crash: one file replaced, .metadata still old
    live = {"a": torch.zeros(3), "b": torch.zeros(3)}
    dcp.load(live, checkpoint_id=tmp_path)
    assert {float(live["a"][0]), float(live["b"][0])} == {1.0, 2.0}


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path / "a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(AlreadyExistsError, match="one is never written over"):
        save({"a": torch.zeros(3)}, tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExistsError, match="is not empty"):
        save({"a": torch.ones(3)}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_files_of_another_checkpoint_are_not_accepted(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path / "a")
    save({"a": torch.full((3,), 2.0)}, tmp_path / "b")
    for name in ("rank-00000.safetensors", "rank-00000.json"):
        keep = (tmp_path / "a" / name).read_bytes()
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
        with pytest.raises(CheckpointError, match=name):
            load({"a": torch.zeros(3)}, tmp_path / "a")
        (tmp_path / "a" / name).write_bytes(keep)
    load({"a": torch.zeros(3)}, tmp_path / "a")


# --- damage and coverage


def test_stock_loads_a_flipped_byte(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(300)}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    position = file.read_bytes().index(torch.ones(300).numpy().tobytes())
    flip(file, position + 5)
    live = {"a": torch.zeros(300)}
    dcp.load(live, checkpoint_id=tmp_path)
    assert not torch.equal(live["a"], torch.ones(300))


@pytest.mark.parametrize("planner", [LoadPlanner, dcp.DefaultLoadPlanner])
def test_a_flipped_byte_anywhere_is_an_error(tmp_path: Path, planner: Any) -> None:
    save({"a": torch.ones(30), "n": 3}, tmp_path, DefaultSavePlanner())
    for file in sorted(tmp_path.iterdir()):
        for position in range(0, file.stat().st_size, 23):
            flip(file, position)
            with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
                load({"a": torch.zeros(30), "n": 0}, tmp_path, planner())
            flip(file, position)
    load({"a": torch.zeros(30), "n": 0}, tmp_path, planner())


def test_stock_loads_a_metadata_that_misses_a_chunk(tmp_path: Path) -> None:
    dcp.save({"w": W}, checkpoint_id=tmp_path, planner=InTwo())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())  # noqa: S301  # written two lines above
    metadata.state_dict_metadata["w"].chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    live = {"w": torch.full((7, 2), -1.0)}
    dcp.load(live, checkpoint_id=tmp_path)
    assert torch.equal(live["w"][3:], torch.full((4, 2), -1.0))


def test_a_manifest_that_misses_a_chunk_is_refused(tmp_path: Path) -> None:
    save({"w": W}, tmp_path, InTwo())

    def drop(tree: dict[str, Any]) -> None:
        layout = tree["layouts"][0]
        layout["boxes"].pop()
        layout["ranks"].pop()

    edit_manifest(tmp_path, drop)
    with pytest.raises(CheckpointError, match=r"state/w: chunks hold 6 elements, the tensor of shape .7, 2. 14"):
        load({"w": torch.zeros(7, 2)}, tmp_path)


class Holes(LoadPlanner):
    """As if the metadata had lost a chunk between reader and planner."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        metadata.state_dict_metadata["w"].chunks.pop()
        super().set_up_planner(state_dict, metadata, is_coordinator)


class Doubled(LoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        chunks = metadata.state_dict_metadata["w"].chunks
        chunks[1] = dataclasses.replace(chunks[0], sizes=torch.Size((4, 2)))
        super().set_up_planner(state_dict, metadata, is_coordinator)


@pytest.mark.parametrize(("planner", "words"), [(Holes, "covers 6 elements of"), (Doubled, "overlap")])
def test_every_element_is_covered_once_before_anything_is_read(tmp_path: Path, planner: Any, words: str) -> None:
    save({"w": W}, tmp_path, InTwo())
    live = {"w": torch.full((7, 2), -1.0)}
    with pytest.raises(CheckpointError, match=words):
        load(live, tmp_path, planner())
    assert torch.equal(live["w"], torch.full((7, 2), -1.0))


def test_stock_casts_without_a_word(tmp_path: Path) -> None:
    dcp.save({"a": torch.full((3,), 1.7)}, checkpoint_id=tmp_path)
    live = {"a": torch.zeros(3, dtype=torch.int8)}
    dcp.load(live, checkpoint_id=tmp_path)
    assert torch.equal(live["a"], torch.ones(3, dtype=torch.int8))


@pytest.mark.parametrize("planner", [LoadPlanner, dcp.DefaultLoadPlanner])
def test_another_dtype_is_refused_by_any_planner(tmp_path: Path, planner: Any) -> None:
    save({"a": torch.full((3,), 1.7)}, tmp_path)
    live = {"a": torch.zeros(3, dtype=torch.int8)}
    with pytest.raises(MismatchError, match=r"a: the checkpoint holds.*float32 \[3\].*int8 \[3\]"):
        load(live, tmp_path, planner())
    assert torch.equal(live["a"], torch.zeros(3, dtype=torch.int8))


# --- keys


def keyed(number: int) -> dict[str, Any]:
    return {"state": {0: {"moment": torch.full((2,), float(number)), "count": number}}, "history": {}}


def test_stock_leaves_an_int_keyed_value_stale_and_drops_empty_dicts(tmp_path: Path) -> None:
    dcp.save(keyed(3), checkpoint_id=tmp_path)
    live = keyed(5)
    dcp.load(live, checkpoint_id=tmp_path)
    assert live["state"][0]["count"] == 5 and live["state"]["0"]["count"] == 3
    assert "history" not in dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata


def test_int_keyed_values_and_empty_dicts_come_back(tmp_path: Path) -> None:
    save(keyed(3), tmp_path)
    live = keyed(5)
    load(live, tmp_path)
    assert live["state"][0]["count"] == 3 and list(live["state"]) == [0] and live["history"] == {}
    full = keyed(5)
    full["history"] = {"a": 1}
    load(full, tmp_path)
    assert full["history"] == {}


def test_stock_ignores_what_the_program_has_no_place_for(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": torch.ones(3)}, checkpoint_id=tmp_path)
    dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path)


def test_what_the_program_has_no_place_for_is_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    with pytest.raises(MismatchError, match="the program has no b"):
        load({"a": torch.zeros(3)}, tmp_path)


# --- the plan cache


def test_the_stock_plan_cache_records_the_dtype_of_an_earlier_save(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.ones(3, dtype=dtype)}, checkpoint_id=tmp_path / name, planner=planner)
    entry = dcp.FileSystemReader(tmp_path / "b").read_metadata().state_dict_metadata["w"]
    assert entry.properties.dtype is torch.float32


def test_the_writer_notices_a_plan_of_another_dtype(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "a", DefaultSavePlanner(enable_plan_caching=True))
    save({"w": torch.zeros(3)}, tmp_path / "b", DefaultSavePlanner(enable_plan_caching=True))
    live = {"w": torch.ones(3)}
    load(live, tmp_path / "b")
    assert torch.equal(live["w"], torch.zeros(3))
    with pytest.raises(UsageError, match=r"w: planned were torch.float32 \[3\], the state holds torch.bfloat16"):
        save({"w": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "c", DefaultSavePlanner(enable_plan_caching=True))


def test_our_plan_cache_sees_dtypes_shapes_and_keys(tmp_path: Path) -> None:
    planner = SavePlanner(enable_plan_caching=True)
    states: list[dict[str, Any]] = [
        {"w": torch.ones(3), "n": 1},
        {"w": torch.zeros(3), "n": 2},
        {"w": torch.ones(3, dtype=torch.bfloat16), "n": 3},
        {"w": torch.ones(4, dtype=torch.bfloat16), "n": 3},
        {"v": torch.ones(4, dtype=torch.bfloat16), "n": 3},
        {"w": torch.ones(3), "n": 1},
    ]
    sent = []
    for number, state in enumerate(states):
        save(state, tmp_path / str(number), planner)
        planner.set_up_planner(state, is_coordinator=True)
        sent.append(planner.create_local_plan().usable)
        live = {key: torch.full_like(v, 9) if isinstance(v, torch.Tensor) else 0 for key, v in state.items()}
        load(live, tmp_path / str(number))
        assert all(
            torch.equal(live[key], v) if isinstance(v, torch.Tensor) else live[key] == v for key, v in state.items()
        )
    assert sent == [False] * len(states)  # the same state again is not sent again


def test_a_cache_that_rank_zero_does_not_share_is_refused() -> None:
    planner, other = SavePlanner(enable_plan_caching=True), SavePlanner(enable_plan_caching=True)
    planner.set_up_planner({"w": torch.ones(3)}, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    planner.finish_plan(plans[0])
    with pytest.raises(UsageError, match="rank 0 does not know it"):
        other.create_global_plan([planner.create_local_plan()])


# --- the driver's habits


def test_failures_are_no_exceptions_until_they_are_unwrapped(tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:  # that it is no Exception is the point
        dcp.load({"a": torch.zeros(3)}, storage_reader=Reader(tmp_path / "none"))
    assert not isinstance(caught.value, Exception)
    with pytest.raises(CheckpointError, match=r"none/manifest\.json: no manifest") as real, real_errors():
        dcp.load({"a": torch.zeros(3)}, storage_reader=Reader(tmp_path / "none"))
    assert "ranks that failed: [0]" in real.value.__notes__[0]


def test_what_the_driver_looks_for_in_signatures() -> None:
    assert "kwargs" in inspect.signature(Writer.set_up_storage_writer).parameters  # else it passes no rank
    assert "kwargs" not in inspect.signature(Reader.read_metadata).parameters  # else it reads twice
    assert bool(Writer("a")) and bool(Reader("a"))
    assert not isinstance(Writer("a"), AsyncStager)  # else it would be taken for the stager


def test_a_writer_used_again_needs_a_new_path(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    with real_errors():
        dcp.save({"a": torch.ones(3)}, storage_writer=writer)
        with pytest.raises(AlreadyExistsError), real_errors():
            dcp.save({"a": torch.zeros(3)}, storage_writer=writer)
        dcp.save({"a": torch.zeros(3)}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    live = {"a": torch.full((3,), 9.0)}
    reader = Reader(tmp_path / "a")
    dcp.load(live, storage_reader=reader)
    assert torch.equal(live["a"], torch.ones(3))
    dcp.load(live, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert torch.equal(live["a"], torch.zeros(3))


def test_a_save_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use_collectives=False"):
        dcp.save({"a": torch.ones(3)}, storage_writer=Writer(tmp_path / "a"), use_collectives=False)
    assert not (tmp_path / "a").exists()


def test_metadata_is_filled_in_place(tmp_path: Path) -> None:
    metadata = save({"a": torch.ones(3), "n": 1}, tmp_path / "a")
    assert metadata.version == "ckpt.v1" and str(tmp_path / "a") == metadata.storage_meta.checkpoint_id
    assert {index.fqn for index in metadata.storage_data} == {"a", "n"}


# --- asynchronous saves


def test_an_asynchronous_save_holds_what_was_staged(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "n": {"count": 1}}
    future = dcp.async_save(state, storage_writer=Writer(tmp_path / "a"), planner=SavePlanner())
    state["a"].zero_()
    with real_errors():
        future.result()
    live = {"a": torch.zeros(3), "n": {"count": 0}}
    load(live, tmp_path / "a")
    assert torch.equal(live["a"], torch.ones(3)) and live["n"] == {"count": 1}


def test_of_two_saves_in_flight_to_one_path_only_one_is_published(tmp_path: Path) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Writer):
        def write_data(self, plan: Any, planner: Any) -> Any:
            entered.set()
            assert go.wait(30)
            return super().write_data(plan, planner)

    first = dcp.async_save({"a": torch.ones(3)}, storage_writer=Slow(tmp_path / "a"))
    assert entered.wait(30)
    with pytest.raises(AlreadyExistsError, match="another save is under way"):
        save({"a": torch.zeros(3)}, tmp_path / "a")
    go.set()
    with real_errors():
        first.result()
    live = {"a": torch.zeros(3)}
    load(live, tmp_path / "a")
    assert torch.equal(live["a"], torch.ones(3))


def test_writer_planner_and_errors_travel_to_another_process(tmp_path: Path) -> None:
    for thing in (Writer(tmp_path), SavePlanner(), SavePlanner(enable_plan_caching=True)):
        pickle.loads(pickle.dumps(thing))  # noqa: S301  # what DCP itself does in PROCESS mode
    for error in (UsageError("w: x"), AlreadyExistsError(17, "there", "path"), DamagedError("w: x")):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301  # what DCP does with a failure on another rank
        assert (type(again), str(again)) == (type(error), str(error))
