"""What a folder holds, leaf by leaf, and what counts as a difference: each kind of file, each kind of change."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from samerun.drill.outside.compare import SPREAD_FACTOR, Difference, Nature, beyond, compare_folders, difference_of
from samerun.drill.outside.naming import component_of, is_wall_clock
from samerun.drill.outside.outputs import Digest, files_in, leaves, rows_of

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(91, dtype=torch.float32).reshape(7, 13), "half": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {"state": {0: {"exp_avg": torch.zeros(7), "step": torch.tensor(4.0)}}, "param_groups": [{"lr": 0.1}]},
    "step": 4,
    "empty": {},
    "none": None,
    "numpy": np.arange(3),
}


def write(folder: Path, state: dict[str, Any] = STATE) -> Path:
    folder.mkdir()
    torch.save(state, folder / "state.pt")
    save_file({"w": state["model"]["w"]}, folder / "model.safetensors")
    (folder / "state.json").write_text(
        json.dumps({"step": state["step"], "loss": 0.5, "train_runtime": random.random()})
    )
    (folder / "notes.txt").write_text("x")
    (folder / "events.out.tfevents.1.host").write_text(str(random.random()))
    return folder


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state: dict[str, Any] = {**STATE}
    here = state
    for key in path[:-1]:
        here[key] = here[key].copy()
        here = here[key]
    here[path[-1]] = value
    return state


def test_equal_folders_have_no_difference_though_times_and_event_files_differ(tmp_path: Path) -> None:
    assert compare_folders(write(tmp_path / "a"), write(tmp_path / "b")) == []


def test_every_key_of_a_file_is_a_leaf(tmp_path: Path) -> None:
    found = leaves(write(tmp_path / "a"), Path("state.pt"))
    assert set(found) == {
        "state.pt/model/w", "state.pt/model/half", "state.pt/optimizer/state/0/exp_avg",
        "state.pt/optimizer/state/0/step", "state.pt/optimizer/param_groups/0/lr", "state.pt/step", "state.pt/empty",
        "state.pt/none", "state.pt/numpy",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("model", "w"), STATE["model"]["w"] + 0.25, ("state.pt/model/w", Nature.NUMBER, 0.25)),
        (("model", "w"), STATE["model"]["w"].double(), ("state.pt/model/w", Nature.EXACT, None)),
        (("model", "w"), STATE["model"]["w"][:-1], ("state.pt/model/w", Nature.EXACT, None)),
        (("model", "half"), -torch.zeros(3, dtype=torch.bfloat16), ("state.pt/model/half", Nature.NUMBER, 1.0)),
        (("step",), 5, ("state.pt/step", Nature.EXACT, 1.0)),
        (("none",), 0, ("state.pt/none", Nature.EXACT, None)),
        (("numpy",), np.arange(1, 4), ("state.pt/numpy", Nature.EXACT, 1.0)),
    ],
)
def test_a_change_is_named_with_its_nature_and_size(tmp_path: Path, path: Any, value: Any, expected: Any) -> None:
    found = compare_folders(write(tmp_path / "a"), write(tmp_path / "b", changed(path, value)))
    assert expected in [(one.path, one.nature, one.size) for one in found]


def test_minus_zero_is_another_number_and_nan_is_itself() -> None:
    assert difference_of("w", torch.zeros(2), -torch.zeros(2)) == Difference(path="w", nature=Nature.NUMBER, size=0.0)
    assert difference_of("w", torch.tensor(float("nan")), torch.tensor(float("nan"))) is None
    assert difference_of("w", float("nan"), float("nan")) is None
    assert difference_of("w", 1, 1.0) is not None and difference_of("w", 1, True) is not None


def test_a_missing_file_is_a_difference_and_one_more_is_none(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    (other / "model.safetensors").unlink()
    found = compare_folders(one, other)
    assert [(one.path, one.nature) for one in found] == [("model.safetensors", Nature.MISSING)]
    assert compare_folders(other, one) == []


def test_a_file_that_would_run_code_is_compared_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    torch.save({"path": Path("x"), "step": 3}, tmp_path / "a" / "args.bin")
    found = leaves(tmp_path / "a", Path("args.bin"))
    assert list(found) == ["args.bin"] and isinstance(found["args.bin"], Digest)


def test_the_random_state_that_scripts_save_is_read_and_is_drift(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        torch.save(state, tmp_path / name / "rng_state.pth")
        torch.rand(1), np.random.random(), random.random()
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    assert {one.component for one in found} == {"rng"}
    assert {one.nature for one in found} == {Nature.NUMBER}


def test_a_dcp_directory_is_compared_tensor_by_tensor(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # DCP says that it saves in a single process, which is what is wanted
    for name, extra in (("a", 0.0), ("b", 0.0), ("c", 0.5)):
        dcp.save(
            {"w": torch.arange(91.0) + extra, "v": torch.ones(7, 13), "n": 3},
            checkpoint_id=tmp_path / name,
            no_dist=True,
        )
    spread = compare_folders(tmp_path / "a", tmp_path / "b")
    assert {one.path for one in spread} <= {".metadata"}
    found = [one for one in compare_folders(tmp_path / "a", tmp_path / "c") if one.path != ".metadata"]
    assert [(one.nature, one.size, one.component) for one in found] == [(Nature.NUMBER, 0.5, "state")]


def test_what_twins_differ_in_sets_the_measure() -> None:
    def at(size: float | None, path: str = "w") -> Difference:
        return Difference(path=path, nature=Nature.NUMBER, size=size)

    assert beyond([at(SPREAD_FACTOR)], [at(1.0)]) == []
    assert beyond([at(SPREAD_FACTOR + 0.01)], [at(1.0)]) != []
    assert beyond([at(0.1)], []) == [at(0.1)]
    assert beyond([at(0.1, "v")], [at(1.0)]) == [at(0.1, "v")]
    assert beyond([at(9.0)], [at(None)]) == []


@pytest.mark.parametrize(
    ("path", "component"),
    [
        ("model.safetensors/h.0.weight", "weights"),
        ("model.safetensors/position.weight", "weights"),
        ("state.pt/optimizer/state/0/exp_avg", "moments"),
        ("state.pt/optimizer/state/0/step", "steps"),
        ("step-000300.pt/optimizer/state/0/exp_avg", "moments"),
        ("step-000300.pt/model/0.weight", "weights"),
        ("checkpoint-8/optimizer.pt/state/0/step", "steps"),
        ("optimizer.pt/param_groups/0/lr", "scheduler"),
        ("scheduler.pt/last_epoch", "scheduler"),
        ("rng_state.pth/cpu", "rng"),
        ("state.json/sampler/offset", "cursor"),
        ("model.pt/bn/running_mean", "buffers"),
        ("ema.pt/h.0.weight", "ema"),
        ("trainer_state.json/global_step", "progress"),
        ("trainer_state.json/log_history/3/loss", "loss"),
    ],
)
def test_names_that_people_use_belong_to_components(path: str, component: str) -> None:
    assert component_of(path) == component


def test_wall_clock_values_are_no_part_of_a_run() -> None:
    assert all(is_wall_clock(f"log.json/0/{key}") for key in ("time", "train_runtime", "seconds", "steps_per_second"))
    assert not any(is_wall_clock(f"log.json/0/{key}") for key in ("step", "loss", "sometimes", "candidates", "lr"))


def test_rows_that_a_kill_cut_are_dropped() -> None:
    assert rows_of('{"step": 1}\n{"step": 2}\n{"ste', ".jsonl") == [{"step": 1}, {"step": 2}]
    assert rows_of("step,loss\n1,0.5\n2,0.", ".csv") == [{"step": 1, "loss": 0.5}]


def test_rows_are_compared_by_their_step_and_the_last_one_counts(tmp_path: Path) -> None:
    for name, rows in (("a", [1, 2, 3]), ("b", [1, 2, 2, 3])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text("step,loss\n" + "".join(f"{row},{row}.5\n" for row in rows))
    assert compare_folders(tmp_path / "a", tmp_path / "b") == []
    assert files_in(tmp_path / "a") == [Path("log.csv")]
