"""The comparison: nothing is found in equal traces, and every change on purpose is found, where it is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from samerun.core.component import COMPONENTS
from samerun.drill.traces import First, Line, causes, first_differences, in_order, read_traces, updates_done
from samerun.drill.verdict import Verdict, compare

NAMES = ("weights", "moments", "steps", "cursor", "rng", "mine")
KEYS = ("a.weight", "b.bias", "value:")


def held(window: int, rank: int) -> dict[str, dict[str, str]]:
    return {
        name: {key: str(window * 10 + rank) if key == "value:" else f"x{name}{key}{window}{rank}" for key in KEYS}
        for name in NAMES
    }


def record(kind: str, window: int, rank: int, *, saved: Any = None) -> dict[str, Any]:
    progress = {"windows": window, "skipped": 1 if window > 2 else 0, "samples": 0, "tokens": 0}
    progress["updates"] = window - progress["skipped"]
    line = {"kind": kind, "progress": progress, "held": held(window, rank)}
    return line if saved is None else {**line, "saved": saved}


def write(folder: Path, attempt: int, rank: int, lines: list[dict[str, Any]], *, cut: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(line) + "\n" for line in lines)
    file = folder / f"attempt-{attempt:06d}.rank-{rank:05d}.jsonl"
    file.write_text(data[:-7] if cut else data)


def make_twin(folder: Path) -> list[Line]:
    for rank in range(2):
        write(folder, 1, rank, [record("edge", window, rank) for window in range(7)])
    return read_traces(folder)


def make_run(folder: Path, change: Any = None) -> list[Line]:
    """Interrupted in window 4 (its line cut on rank 1), resumed from 3: window 3 and 4 are done twice."""
    attempts = {1: range(5), 2: range(3, 7)}
    for attempt, windows in attempts.items():
        for rank in range(2):
            lines = [record("edge", window, rank) for window in windows]
            if attempt == 2:
                lines.insert(0, record("restored", 3, rank, saved=held(3, rank)))
            if change is not None:
                change(attempt, rank, lines)
            write(folder, attempt, rank, lines, cut=attempt == 1 and rank == 1)
    return read_traces(folder)


def test_an_interrupted_run_that_repeats_windows_is_the_same(tmp_path: Path) -> None:
    twin, other = make_twin(tmp_path / "twin"), make_run(tmp_path / "run")
    assert first_differences(twin, other) == dict.fromkeys(in_order(NAMES))
    assert causes(other) == []


def test_a_line_that_a_kill_cut_is_dropped(tmp_path: Path) -> None:
    lines = make_run(tmp_path)
    first_attempt = [line for line in lines if line.attempt == 1]
    assert [line.window for line in first_attempt if line.rank == 0] == [0, 1, 2, 3, 4]
    assert [line.window for line in first_attempt if line.rank == 1] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("attempt", "rank", "window"), [(1, 0, 0), (1, 1, 3), (2, 1, 3), (2, 0, 6)])
def test_one_changed_entry_is_named_with_update_rank_and_key(
    tmp_path: Path, name: str, key: str, attempt: int, rank: int, window: int
) -> None:
    def change(at: int, on: int, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if (at, on, line["progress"]["windows"], line["kind"]) == (attempt, rank, window, "edge"):
                line["held"][name][key] = str(window * 10 + rank + 0.5) if key == "value:" else "xother"

    twin, other = make_twin(tmp_path / "twin"), make_run(tmp_path / "run", change)
    found = first_differences(twin, other)
    update = window - (1 if window > 2 else 0)
    size = 0.5 if key == "value:" else None
    assert found[name] == First(update=update, rank=rank, key=key.removesuffix(":"), size=size)
    assert all(first is None for other_name, first in found.items() if other_name != name)


def test_the_first_of_several_differences_is_the_one_named(tmp_path: Path) -> None:
    def change(attempt: int, rank: int, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["kind"] == "edge" and line["progress"]["windows"] >= 4 and attempt == 2:
                line["held"]["weights"]["b.bias"] = "xother"

    twin, other = make_twin(tmp_path / "twin"), make_run(tmp_path / "run", change)
    first = first_differences(twin, other)["weights"]
    assert first is not None
    assert (first.update, first.rank, first.key) == (3, 0, "b.bias")


def test_an_entry_or_a_component_that_one_side_lacks_is_a_difference(tmp_path: Path) -> None:
    def less(attempt: int, rank: int, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            del line["held"]["moments"]["a.weight"]
            del line["held"]["rng"]

    twin, other = make_twin(tmp_path / "twin"), make_run(tmp_path / "run", less)
    found = first_differences(twin, other)
    assert found["moments"] == First(update=0, rank=0, key="a.weight", size=None)
    assert found["rng"] is not None
    assert found["weights"] is None
    turned = first_differences(other, twin)
    assert turned["moments"] is not None and turned["rng"] is not None


def test_a_run_that_ends_early_is_not_the_same(tmp_path: Path) -> None:
    def stop(attempt: int, rank: int, lines: list[dict[str, Any]]) -> None:
        lines[:] = [line for line in lines if line["progress"]["windows"] < 6]

    twin, other = make_twin(tmp_path / "twin"), make_run(tmp_path / "run", stop)
    found = first_differences(twin, other)
    assert {first.key for first in found.values() if first} == {"(this edge was never reached)"}
    assert None not in found.values()


def test_a_run_that_goes_too_far_is_not_the_same(tmp_path: Path) -> None:
    def more(attempt: int, rank: int, lines: list[dict[str, Any]]) -> None:
        if attempt == 2:
            lines.append(record("edge", 7, rank))

    twin, other = make_twin(tmp_path / "twin"), make_run(tmp_path / "run", more)
    assert None not in first_differences(twin, other).values()


def test_a_missing_rank_is_not_the_same(tmp_path: Path) -> None:
    twin = make_twin(tmp_path / "twin")
    other = [line for line in make_run(tmp_path / "run") if line.rank == 0]
    assert None not in first_differences(twin, other).values()


def test_no_traces_at_all_is_not_the_same(tmp_path: Path) -> None:
    twin = make_twin(tmp_path / "twin")
    assert None not in first_differences(twin, []).values()


@pytest.mark.parametrize("name", NAMES)
def test_the_cause_is_what_differed_right_after_the_restore(tmp_path: Path, name: str) -> None:
    def change(attempt: int, rank: int, lines: list[dict[str, Any]]) -> None:
        if attempt == 2:
            for line in lines:  # everything differs later, as one fault spreads
                line["held"] = {n: dict.fromkeys(KEYS, "xlater") for n in NAMES}
            lines[0] = record("restored", 3, rank, saved=held(3, rank))
            if rank == 1:
                lines[0]["held"] = copy.deepcopy(lines[0]["held"])
                lines[0]["held"][name]["a.weight"] = "xfresh"

    assert causes(make_run(tmp_path, change)) == [name]


def test_a_component_that_vanished_in_the_restore_is_a_cause(tmp_path: Path) -> None:
    def change(attempt: int, rank: int, lines: list[dict[str, Any]]) -> None:
        if lines[0]["kind"] == "restored":
            del lines[0]["held"]["moments"]

    assert causes(make_run(tmp_path, change)) == ["moments"]


def test_components_come_in_the_one_order() -> None:
    assert in_order(["zeta", "alpha", *reversed(COMPONENTS)]) == [*COMPONENTS, "alpha", "zeta"]


def test_how_far_the_newest_attempt_is(tmp_path: Path) -> None:
    assert updates_done(tmp_path) == 0
    make_run(tmp_path)
    assert updates_done(tmp_path) == 5


def test_a_verdict_says_same_only_with_nothing_against_it() -> None:
    first = First(update=3, rank=1, key="w", size=0.5)
    assert Verdict(components={"weights": None}, cause=[]).same
    assert not Verdict(components={"weights": None, "rng": first}, cause=[]).same
    assert not Verdict(components={"weights": None}, cause=[], problem="the twin itself failed").same
    assert Verdict(components={"weights": None, "rng": first}, cause=["rng"]).to_json() == {
        "verdict": "differs",
        "components": {
            "weights": {"verdict": "same", "first": None},
            "rng": {"verdict": "differs", "first": {"update": 3, "rank": 1, "key": "w", "size": 0.5}},
        },
        "cause": ["rng"],
    }


def test_a_verdict_stands_without_readable_checkpoints(tmp_path: Path) -> None:
    def change(attempt: int, rank: int, lines: list[dict[str, Any]]) -> None:
        lines[-1]["held"]["weights"]["a.weight"] = "xother"

    twin, other = make_twin(tmp_path / "twin"), make_run(tmp_path / "run", change)
    (tmp_path / "elsewhere").mkdir()
    verdict = compare(twin, other, twin_path=str(tmp_path / "none"), other_path=str(tmp_path / "elsewhere"))
    assert not verdict.same
    assert verdict.components["weights"] is not None
