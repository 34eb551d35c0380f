"""One process: what `dcp.save` wrote comes back, on any planner, and is a checkpoint of ckpt.v1 like any other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from samerun.checkpoint.lookup import view
from samerun.checkpoint.verify import verify_checkpoint
from samerun.cli.main import main
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.dcp import LoadPlanner, Reader, SavePlanner, Writer, directory, real_errors
from samerun.errors import CheckpointError, MismatchError, UsageError
from samerun.storage.memory import Memory
from unit.dcp.dcp_states import differences, mixed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict[str, Any], path: Any, planner: Any = None) -> Any:
    with real_errors():
        return dcp.save(state, storage_writer=Writer(path), planner=planner)


def load(state: dict[str, Any], path: Any, planner: Any = None) -> Reader:
    reader = Reader(path)
    with real_errors():
        dcp.load(state, storage_reader=reader, planner=planner)
    return reader


def test_everything_comes_back_with_its_types(tmp_path: Path) -> None:
    saved, live = mixed(3), mixed(5)
    assert differences(saved, live) != []
    save(saved, tmp_path / "a", SavePlanner())
    load(live, tmp_path / "a", LoadPlanner())
    assert differences(saved, live) == []


def test_stock_planners_work_as_they_are(tmp_path: Path) -> None:
    saved, live = mixed(3), mixed(5)
    save(saved, tmp_path / "a")
    load(live, tmp_path / "a")
    # what stock flattening loses (int keys, empty dicts) is its own; everything else is exact
    for state in (saved, live):
        del state["scheduler"]["milestones"], state["table"]
    assert differences(saved, live) == []


def test_our_load_planner_puts_back_what_a_stock_one_saved(tmp_path: Path) -> None:
    saved, live = mixed(3), mixed(5)
    save(saved, tmp_path / "a", DefaultSavePlanner())
    load(live, tmp_path / "a", LoadPlanner())
    assert differences(saved, live) == []


def test_our_planners_work_with_stock_storage(tmp_path: Path) -> None:
    saved, live = mixed(3), mixed(5)
    with real_errors():
        dcp.save(saved, checkpoint_id=tmp_path / "a", planner=SavePlanner())
        dcp.load(live, checkpoint_id=tmp_path / "a", planner=LoadPlanner())
    assert differences(saved, live) == []


def test_states_are_stateful_objects_too(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save({"model": model}, tmp_path / "a", SavePlanner())
    load({"model": other}, tmp_path / "a", LoadPlanner())
    assert differences(dict(model.state_dict()), dict(other.state_dict())) == []


def test_the_whole_state_is_rebuilt_without_a_template(tmp_path: Path) -> None:
    saved = {"a": {"b": torch.arange(7)}, "list": [{"c": torch.ones(2)}, 3], "n": 4}
    save(saved, tmp_path / "a", SavePlanner())
    rebuilt: dict[str, Any] = {}
    _load_state_dict(rebuilt, Reader(tmp_path / "a"), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    assert differences(saved, {key: rebuilt[key] for key in saved}) == [] and len(rebuilt) == len(saved)


def test_files_are_plain_safetensors_and_json_and_verify_as_such(tmp_path: Path) -> None:
    save(mixed(3), tmp_path / "a", SavePlanner())
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    ]
    tensors = load_file(tmp_path / "a" / "rank-00000.safetensors")
    assert torch.equal(tensors["state/half"], mixed(3)["half"])
    storage = directory.storage_at(tmp_path / "a")
    name = json.loads((tmp_path / "a" / "manifest.json").read_text())["name"]
    assert verify_checkpoint(view(storage, name), name).problems == ()


def test_any_storage_will_do() -> None:
    memory = Memory()
    save({"w": torch.arange(13)}, memory, SavePlanner())
    live = {"w": torch.zeros(13, dtype=torch.int64)}
    load(live, memory, LoadPlanner())
    assert torch.equal(live["w"], torch.arange(13))


def test_a_directory_of_a_run_can_be_read(tmp_path: Path) -> None:
    from samerun.checkpoint import Store

    entry = Store(tmp_path).save({"weights": Captured(tensors={"w": torch.arange(7)})}, Progress(), facts={}).result()
    live = {"weights/w": torch.zeros(7, dtype=torch.int64)}
    load(live, tmp_path / "checkpoints" / entry.name, LoadPlanner())
    assert torch.equal(live["weights/w"], torch.arange(7))
    with pytest.raises(CheckpointError, match="this is a run: give one directory of its checkpoints/"):
        load(live, tmp_path)


class Thing:
    """Cannot come back without running code."""


@pytest.mark.parametrize("planner", [DefaultSavePlanner, SavePlanner])
@pytest.mark.parametrize("value", [Thing(), {1, 2}, [Thing()], (Thing(),), 1 << 9000])
def test_what_json_cannot_hold_is_refused_by_key(tmp_path: Path, planner: Any, value: Any) -> None:
    with pytest.raises(UsageError, match=r"deep\.odd"):
        save({"deep": {"odd": value, "w": torch.ones(2)}}, tmp_path / "a", planner())
    with pytest.raises(CheckpointError, match="no manifest"):
        load({"w": torch.ones(2)}, tmp_path / "a")


def test_a_value_that_is_refused_by_our_planner_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="odd"):
        save({"odd": Thing()}, tmp_path / "a", SavePlanner())
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(extra=1), "the checkpoint lacks extra"),
        (lambda s: s.pop("n"), "the program has no n"),
        (lambda s: s.update(w=torch.ones(3, dtype=torch.float64)), "torch.float32 .3.*torch.float64 .3"),
        (lambda s: s.update(w=torch.ones(4)), r"float32 \[3\], this program torch.float32 \[4\]"),
        (lambda s: s.update(w=7), r"w: the checkpoint holds torch.float32 \[3\], this program a plain value"),
        (lambda s: s.update(n=torch.ones(1)), "n: the checkpoint holds a plain value"),
        (lambda s: s.update(table={}), r"the checkpoint lacks table; the program has no table\.0\."),
    ],
)
def test_a_program_that_does_not_fit_is_refused_and_left_alone(tmp_path: Path, change: Any, words: str) -> None:
    def state() -> dict[str, Any]:
        return {"w": torch.ones(3), "n": 1, "table": {0: {"m": torch.ones(2), "count": 3}}}

    save(state(), tmp_path / "a", SavePlanner())
    live, before = state(), state()
    change(live)
    change(before)
    with pytest.raises(MismatchError, match=words):
        load(live, tmp_path / "a", LoadPlanner())
    assert differences(live, before) == []


def test_partial_loads_what_both_have_and_lists_the_rest(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(2), "n": 1}, tmp_path / "a", SavePlanner())
    planner = LoadPlanner(partial=True)
    live = {"a": torch.zeros(3), "head": torch.zeros(2), "n": 5}
    load(live, tmp_path / "a", planner)
    assert torch.equal(live["a"], torch.ones(3)) and torch.equal(live["head"], torch.zeros(2)) and live["n"] == 1
    assert (planner.missing, planner.unread) == (("head",), ("b",))


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.0: two entries have this name"):
        save({"a": {0: torch.ones(1), "0": torch.ones(1)}}, tmp_path / "a", SavePlanner())


def test_a_rank_that_reads_less_than_its_plan_is_noticed(tmp_path: Path) -> None:
    class Forgetful(Reader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            plan.items.pop()
            return super().read_data(plan, planner)

    save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "a", SavePlanner())
    with pytest.raises(MismatchError, match="was planned and never read"), real_errors():
        dcp.load(
            {"a": torch.ones(3), "b": torch.ones(2)}, storage_reader=Forgetful(tmp_path / "a"), planner=LoadPlanner()
        )


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
SAFE_TEXT = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=4)
tensors = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    )
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        SAFE_TEXT, plain | tensors | st.dictionaries(SAFE_TEXT | st.integers(), plain | tensors, max_size=3), max_size=4
    )
)
def test_any_state_comes_back_exactly(state: dict[str, Any]) -> None:
    memory = Memory()
    try:
        save(state, memory, SavePlanner())
    except UsageError as error:
        assert any(word in str(error) for word in ("two entries", "lone surrogates", "printable"))
        return
    live = _blank(state)
    load(live, memory, LoadPlanner())
    assert repr(live) == repr(state)  # repr: NaN is itself, True is not 1, order counts


def _blank(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict) and any(isinstance(v, (dict, torch.Tensor)) for v in state.values()):
        return {key: _blank(value) for key, value in state.items()}
    return state


def test_a_stock_planner_loads_whole_values_of_ours(tmp_path: Path) -> None:
    saved, live = {"history": {"a": 1}, "w": torch.ones(2)}, {"history": {"a": 2}, "w": torch.zeros(2)}
    save(saved, tmp_path / "a", SavePlanner())
    load(live, tmp_path / "a", DefaultLoadPlanner())
    assert differences(saved, live) == []


@pytest.mark.parametrize("words", [["verify"], ["ls"], ["show"]])
def test_commands_look_at_such_a_directory(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"w": torch.ones(3), "n": 1}, tmp_path / "a", SavePlanner())
    monkeypatch.setattr(sys, "argv", ["samerun", *words, str(tmp_path / "a")])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["name"] in capsys.readouterr().out
