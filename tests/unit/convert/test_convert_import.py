"""Imports: what foreign files hold comes over exactly, what is hostile or broken does not, and none is a run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import samerun
from samerun.checkpoint import Store
from samerun.convert import import_checkpoint, read
from samerun.dcp import SavePlanner, Writer
from samerun.errors import AlreadyExistsError, DamagedError, MismatchError, SamerunError, SchemaError, UsageError
from unit.dcp.dcp_states import differences, flip, mixed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHTS = {"up.weight": torch.arange(91.0).reshape(7, 13), "up.bias": torch.arange(7).to(torch.bfloat16)}


def torch_source(path: Path, state: Any) -> Path:
    torch.save(state, path / "a.pt")
    return path / "a.pt"


def dcp_source(path: Path, state: Any) -> Path:
    dcp.save(state, checkpoint_id=path / "dcp")
    return path / "dcp"


def ckpt_source(path: Path, state: Any) -> Path:
    dcp.save(state, storage_writer=Writer(path / "ckpt"), planner=SavePlanner())
    return path / "ckpt"


def safetensors_source(path: Path, state: Any) -> Path:
    save_file(state, path / "a.safetensors")
    return path / "a.safetensors"


def hf_source(path: Path, state: Any) -> Path:
    (path / "hf").mkdir()
    table = {}
    for number, (key, tensor) in enumerate(state.items()):
        name = f"model-{number + 1:05d}-of-{len(state):05d}.safetensors"
        save_file({key: tensor}, path / "hf" / name)
        table[key] = name
    (path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return path / "hf"


SOURCES = {
    "torch": torch_source,
    "dcp": dcp_source,
    "ckpt.v1": ckpt_source,
    "safetensors": safetensors_source,
    "hf": hf_source,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_weights_come_over_exactly_and_a_new_run_can_begin_with_them(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path, WEIGHTS)
    found = read(source)
    assert found.kind == kind and differences(dict(sorted(found.state.items())), dict(sorted(WEIGHTS.items()))) == []
    entry = import_checkpoint(source, tmp_path / "run")
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(13, 7)})
    model["up"].bias = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    assert samerun.warm_start(tmp_path / "run", model=model) == entry.name
    assert differences(dict(model.state_dict()), {key: WEIGHTS[key] for key in model.state_dict()}) == []


@pytest.mark.parametrize("kind", ["torch", "dcp", "ckpt.v1"])
def test_whole_states_come_over(tmp_path: Path, kind: str) -> None:
    saved = mixed(3)
    state = read(SOURCES[kind](tmp_path, saved)).state
    if kind == "dcp":  # what stock flattening loses never reached the file
        for tree in (saved, state):
            del tree["table"], tree["scheduler"]
        del saved["history"]
        saved["optimizer"]["state"] = {str(key): value for key, value in saved["optimizer"]["state"].items()}
    if kind == "ckpt.v1":
        for tree in (saved, state):
            del tree["table"]
        saved["optimizer"]["state"] = {str(key): value for key, value in saved["optimizer"]["state"].items()}
    saved["model"] = dict(saved["model"])
    state["model"] = dict(state["model"])
    assert differences(ordered(state), ordered(saved)) == []


def ordered(tree: Any) -> Any:
    """A tree rebuilt without a template has its keys in the order of the file."""
    if isinstance(tree, dict):
        return {key: ordered(tree[key]) for key in sorted(tree, key=str)}
    return tree


def test_weights_of_a_larger_state_are_found_and_the_rest_is_kept(tmp_path: Path) -> None:
    wrapped = OrderedDict((f"module.{key}", tensor) for key, tensor in WEIGHTS.items())
    source = torch_source(tmp_path, {"epoch": 3, "model": wrapped, "optimizer": {"m": torch.ones(2)}})
    store = Store(tmp_path / "run")
    with store.open(import_checkpoint(source, tmp_path / "run")) as checkpoint:
        assert set(checkpoint.source("weights").specs) == set(WEIGHTS)
        assert checkpoint.source("imported").plain["epoch"] == 3
        assert set(checkpoint.source("imported").specs) == {"optimizer.m"}
    entry = import_checkpoint(source, tmp_path / "other", weights="model", buffers=["*.bias"])
    with Store(tmp_path / "other").open(entry) as checkpoint:
        assert set(checkpoint.source("weights").specs) == {"up.weight"}
        assert set(checkpoint.source("buffers").specs) == {"up.bias"}
    with pytest.raises(UsageError, match="'epoch' is a table of tensors; say which key"):
        import_checkpoint(source, tmp_path / "third", weights="epoch")
    with pytest.raises(AlreadyExistsError):
        import_checkpoint(source, tmp_path / "run")
    with pytest.raises(UsageError, match="none of its keys"):
        import_checkpoint(torch_source(tmp_path, {"epoch": 3}), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_an_import_is_refused_as_a_run_to_resume(tmp_path: Path) -> None:
    import_checkpoint(torch_source(tmp_path, WEIGHTS), tmp_path / "run")
    with pytest.raises(MismatchError, match="holds an import, weights for use: optimizer memory"):
        Store(tmp_path / "run").read_run()


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    bad = torch_source(tmp_path, {"w": torch.ones(2), "x": Payload(mark)})
    with pytest.raises(DamagedError, match="cannot be read without running its code"):
        read(bad)
    folder = dcp_source(tmp_path, {"w": torch.ones(2)})
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(DamagedError, match=r"asks for posix\.system"):
        read(folder)
    values = tmp_path / "values"
    dcp.save({"w": torch.ones(2), "x": Payload(mark)}, checkpoint_id=values)
    with pytest.raises(DamagedError, match="x: cannot be read without running its code"):
        read(values)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))  # noqa: S301  # the control: it would have run
    assert mark.exists()


def edited(folder: Path, edit: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  # written by this test
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def info(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: setattr(info(m), "relative_path", "../../etc/passwd"), "leaves the directory"),
        (lambda m: setattr(info(m), "relative_path", "/etc/passwd"), "leaves the directory"),
        (lambda m: setattr(info(m), "relative_path", "gone.distcp"), "missing"),
        (lambda m: setattr(info(m), "offset", -5), "is no size"),
        (lambda m: setattr(info(m), "length", 2**40), "ends before byte"),
        (lambda m: setattr(info(m), "transform_descriptors", ["zstd"]), "through an extension"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size((2**40,))), "claims tensors of"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size((4,))), "does not lie in a tensor"),
        (lambda m: m.state_dict_metadata["w"].chunks.pop(), "chunks hold 0 elements"),
        (lambda m: m.state_dict_metadata["w"].chunks.append(m.state_dict_metadata["w"].chunks[0]), "chunks hold 14"),
        (lambda m: m.planner_data.update(w=()), "two values have its path"),
        (lambda m: setattr(m, "storage_data", None), "NoneType"),
    ],
)
def test_a_dcp_directory_that_does_not_hold_together_is_refused(tmp_path: Path, edit: Any, words: str) -> None:
    folder = dcp_source(tmp_path, {"w": torch.arange(7.0)})
    read(folder)
    edited(folder, edit)
    with pytest.raises((DamagedError, SchemaError), match=words):
        read(folder)


def test_damaged_metadata_is_an_error_of_ours_whatever_byte_it_is(tmp_path: Path) -> None:
    folder = dcp_source(tmp_path, {"w": torch.arange(7.0), "n": 3})
    size = (folder / ".metadata").stat().st_size
    for position in range(0, size, 3):
        flip(folder / ".metadata", position)
        with contextlib.suppress(SamerunError):  # DCP has no digests: a flip that still makes sense cannot be seen
            read(folder)
        flip(folder / ".metadata", position)
    assert torch.equal(read(folder).state["w"], torch.arange(7.0))


def test_a_hugging_face_index_must_be_what_the_files_hold(tmp_path: Path) -> None:
    folder = hf_source(tmp_path, WEIGHTS)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    for change, words in (
        ({"extra": table["up.bias"]}, "extra is in the index only"),
        ({"up.bias": table["up.weight"]}, "is in the"),
        ({"up.bias": "../a.safetensors"}, "names the file"),
        ({"up.bias": "gone.safetensors"}, "missing"),
    ):
        index.write_text(json.dumps({"weight_map": table | change}))
        with pytest.raises((DamagedError, SchemaError), match=words):
            read(folder)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read(tmp_path / "none")
    with pytest.raises(UsageError, match="is no checkpoint that can be imported"):
        read(tmp_path)
    (tmp_path / "a.pt").write_bytes(b"not a file of torch")
    with pytest.raises(DamagedError, match=r"a\.pt"):
        read(tmp_path / "a.pt")
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(DamagedError, match=r"a\.safetensors"):
        read(tmp_path / "a.safetensors")
    with pytest.raises(SchemaError, match="holds a list"):
        read(torch_source(tmp_path, [1]))
