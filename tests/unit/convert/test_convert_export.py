"""Exports: what others read is what was stored, verified on the way; and no export is taken for a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import samerun
from samerun.checkpoint import Store
from samerun.cli.main import main
from samerun.convert import Form, export, import_checkpoint, read
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.errors import AlreadyExistsError, DamagedError, MismatchError, UsageError
from unit.dcp.dcp_states import differences, flip

WEIGHTS = {"a.w": torch.arange(91.0).reshape(7, 13), "b.w": torch.arange(13).to(torch.bfloat16)}
BUFFERS = {"bn.mean": torch.arange(3.0), "bn.count": torch.tensor(4)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = Store(tmp_path / "run")
    store.write_run({"id": "x", "identity": {}})
    state = {
        "weights": Captured(plain={"aliases": {"head.w": "a.w"}}, tensors=WEIGHTS),
        "buffers": Captured(rank_tensors=BUFFERS),
        "moments": Captured(plain={}, tensors={"a.w.exp_avg": torch.ones(7, 13)}),
    }
    store.save(state, Progress(), facts={}).result()
    return tmp_path / "run"


def exported(run: Path, path: Path, form: Form, **options: Any) -> Any:
    store = Store(run)
    with store.open(store.catalog().entries[0]) as checkpoint:
        return export(checkpoint, path, form, **options)


def test_a_torch_file_has_the_second_names_too(run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "a.pt", Form.TORCH)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (
        differences(dict(sorted(found.items())), dict(sorted({**WEIGHTS, **BUFFERS, "head.w": WEIGHTS["a.w"]}.items())))
        == []
    )
    assert found["head.w"].data_ptr() == found["a.w"].data_ptr()


def test_one_safetensors_file(run: Path, tmp_path: Path) -> None:
    done = exported(run, tmp_path / "a.safetensors", Form.SAFETENSORS)
    found = load_file(tmp_path / "a.safetensors")
    assert differences(dict(sorted(found.items())), dict(sorted({**WEIGHTS, **BUFFERS}.items()))) == []
    assert done.tied == {"head.w": "a.w"}


@pytest.mark.parametrize(("limit", "num_files"), [(10**9, 1), (364, 2), (1, 4)])
def test_a_hugging_face_directory_in_files_of_any_size(run: Path, tmp_path: Path, limit: int, num_files: int) -> None:
    exported(run, tmp_path / "out", Form.HF, max_shard_bytes=limit)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == num_files
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (num_files > 1)
    again = read(tmp_path / "out")
    assert again.kind == "hf"
    assert differences(dict(sorted(again.state.items())), dict(sorted({**WEIGHTS, **BUFFERS}.items()))) == []
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["manifest_sha256"] == Store(run).catalog().entries[0].manifest_sha256


def test_an_export_is_refused_as_a_run_and_as_what_it_was_imported_from(run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "out", Form.HF)
    for path in (tmp_path / "out", tmp_path / "again"):
        if path.name == "again":
            import_checkpoint(tmp_path / "out", path)
        with pytest.raises(MismatchError, match="optimizer memory, counters, cursor and random streams"):
            Store(path).read_run()
    assert Store(run).read_run() == {"id": "x", "identity": {}}


def test_nothing_is_written_over(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("mine")
    with pytest.raises(AlreadyExistsError):
        exported(run, tmp_path / "a.pt", Form.TORCH)
    with pytest.raises(AlreadyExistsError):
        exported(run, tmp_path, Form.HF)
    assert (tmp_path / "a.pt").read_text() == "mine"


def test_damaged_bytes_are_never_exported(run: Path, tmp_path: Path) -> None:
    (shard,) = run.rglob("*.safetensors")
    flip(shard, shard.stat().st_size - 3)
    for form in Form:
        with pytest.raises(DamagedError, match="the file is damaged"):
            exported(run, tmp_path / form.value, form)
        assert not list(tmp_path.glob(f"{form.value}/*.safetensors")) and not (tmp_path / form.value).is_file()


def test_what_safetensors_has_no_word_for_goes_to_torch_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    state = {"weights": Captured(plain={"aliases": {}}, tensors={"w": torch.full((3,), 1j)})}
    store.save(state, Progress(), facts={}).result()
    with pytest.raises(UsageError, match=r"w: safetensors has no torch\.complex64"):
        exported(tmp_path / "run", tmp_path / "out", Form.HF)
    exported(tmp_path / "run", tmp_path / "a.pt", Form.TORCH)
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["w"], torch.full((3,), 1j))


def test_the_commands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def samerun(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["samerun", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().out

    out, new = tmp_path / "out", tmp_path / "new"
    code, text = samerun("export", run, out, "--to", "hf", "--json")
    assert code == 0 and json.loads(text)["schema"] == "samerun.export.v1" and json.loads(text)["tensors"] == 4
    code, text = samerun("import", out, new, "--buffer", "bn.*", "--json")
    assert code == 0 and json.loads(text)["kind"] == "hf"
    assert samerun("verify", new)[0] == 0
    assert samerun("export", run, out)[0] == 1  # something is there
    assert samerun("export", run, tmp_path / "x", "--to", "onnx")[0] == 2
    assert samerun("import", tmp_path / "none", tmp_path / "x")[0] == 2
    for command in ("import", "export"):
        code, text = samerun(command, "--help")
        assert code == 0 and f"Example: samerun {command}" in text


def test_export_by_path(run: Path, tmp_path: Path) -> None:
    store = Store(run)
    first = store.catalog().entries[0]
    store.tag("best", first)
    newer = {"weights": Captured(plain={"aliases": {}}, tensors={"a.w": torch.zeros(2)})}
    second = store.save(newer, Progress(), facts={}).result()
    assert samerun.export(run, tmp_path / "newest").checkpoint == second.name
    done = samerun.export(run, tmp_path / "best", checkpoint="best", max_shard="100 B")
    assert (done.checkpoint, done.num_tensors) == (first.name, 4)
    assert len(done.files) == 2 + 1, "one for the tensor above the limit, one for the others, and the index"
    by_directory = samerun.export(run / "checkpoints" / first.name, tmp_path / "one.safetensors", to="safetensors")
    assert by_directory.checkpoint == first.name
    found = load_file(tmp_path / "one.safetensors")
    assert differences(dict(sorted(found.items())), dict(sorted({**WEIGHTS, **BUFFERS}.items()))) == []
    for wrong, words in (({"to": "onnx"}, "to='onnx' is unknown"), ({"checkpoint": "gone"}, "no checkpoint or tag")):
        with pytest.raises(UsageError, match=words):
            samerun.export(run, tmp_path / "x", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no such directory"):
        samerun.export(tmp_path / "nowhere", tmp_path / "x")
    with pytest.raises(AlreadyExistsError):
        samerun.export(run, tmp_path / "best")
    assert not (tmp_path / "x").exists()
