"""The promise itself: interrupted anywhere, also twice, a run ends and passes every edge bitwise as its twin did."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rank_pool import RankError, RankPool
from samerun.checkpoint import Store
from samerun.core.events import read_events
from samerun.drill.traces import First, causes, first_differences, read_traces
from samerun.run.faults import Deed, Fault, FaultPlan

SETUPS = [(1, "none"), (2, "ddp"), (3, "ddp"), (4, "ddp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp")]


def start(
    pool: RankPool, world_size: int, path: Path, trace: Path, *, at: str | None = None, **options: Any
) -> list[dict[str, Any]] | None:
    """One start; with `at`, every rank raises there, and None is returned once they did.

    A point inside a save is passed by the save's own thread: the run ends of it at its next edge.
    """
    faults = tuple(Fault(at=at, rank=rank, deed=Deed.RAISE) for rank in range(world_size)) if at else ()
    plan = FaultPlan(trace=trace, faults=faults)
    try:
        done = pool.run(
            world_size, "scenarios:train", environ={"SAMERUN_FAULTS": plan.to_text()}, path=str(path), **options
        )
    except RankError as error:
        planned = error.kind == "FaultError" or (error.kind == "SaveFailedError" and f"raise at {at}" in error.text)
        if at is None or not planned:
            raise
        return None
    assert at is None, f"the run passed {at} without an interruption"
    return done


def differences(twin: Path, other: Path) -> dict[str, First]:
    found = first_differences(read_traces(twin), read_traces(other))
    return {name: first for name, first in found.items() if first is not None}


@pytest.mark.parametrize(("world_size", "wrap"), SETUPS)
def test_interrupted_anywhere_is_the_twin(ranks: RankPool, tmp_path: Path, world_size: int, wrap: str) -> None:
    """One run, interrupted at every kind of point in turn: before the first save, in mid-window, in the step, inside a
    save, right after a commit, at an edge, soon after a resume, and across the epoch ends at windows 3 and 7."""
    options = {"wrap": wrap}
    twin = start(ranks, world_size, tmp_path / "twin", tmp_path / "twin-trace", **options)
    points = [
        "save:staged",
        "window:1.microbatch:0",
        "window:2.step",
        "save:manifest",
        "edge:4",
        "window:4.microbatch:1" if world_size < 4 else "window:4.microbatch:0",  # ranks 2 and 3 of 4 have one only
        "save:committed",
        "window:7.step",
    ]
    for point in points:
        assert start(ranks, world_size, tmp_path / "run", tmp_path / "run-trace", at=point, **options) is None
    last = start(ranks, world_size, tmp_path / "run", tmp_path / "run-trace", **options)
    assert differences(tmp_path / "twin-trace", tmp_path / "run-trace") == {}
    assert causes(read_traces(tmp_path / "run-trace")) == []
    assert twin is not None and last is not None
    assert last[0]["progress"] == twin[0]["progress"]


@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_and_without_workers(ranks: RankPool, tmp_path: Path, workers: int, own_loader: bool) -> None:
    options = {"workers": workers, "own_loader": own_loader, "until": 7}
    start(ranks, 1, tmp_path / "twin", tmp_path / "twin-trace", **options)
    for point in ("window:2.microbatch:1", "edge:4"):
        start(ranks, 1, tmp_path / "run", tmp_path / "run-trace", at=point, **options)
    start(ranks, 1, tmp_path / "run", tmp_path / "run-trace", **options)
    assert differences(tmp_path / "twin-trace", tmp_path / "run-trace") == {}


def test_same_samples_for_any_number_of_workers(ranks: RankPool, tmp_path: Path) -> None:
    """The whole run is the same with 0 and 2 workers: sample randomness is keyed, the global streams untouched."""
    for workers in (0, 2):
        start(ranks, 1, tmp_path / f"run{workers}", tmp_path / f"trace{workers}", workers=workers)
    assert differences(tmp_path / "trace0", tmp_path / "trace2") == {}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_saving_changes_nothing(ranks: RankPool, tmp_path: Path, wrap: str) -> None:
    """Beside training at every edge, in its way, or hardly ever."""
    for name, every, background in (("beside", "1", True), ("before", "1", False), ("never", "1000", True)):
        options = {"wrap": wrap, "save_every": f"{every} updates", "background": background}
        start(ranks, 2, tmp_path / name, tmp_path / f"{name}-trace", **options)
    assert differences(tmp_path / "never-trace", tmp_path / "beside-trace") == {}
    assert differences(tmp_path / "never-trace", tmp_path / "before-trace") == {}


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_save_that_fails_on_one_rank_fails_at_one_edge_on_all(ranks: RankPool, tmp_path: Path, policy: str) -> None:
    """Rank 1's disk is full from the save of update 3 on; its peers hear of it with a window's agreement."""
    full = Fault(at="save:op:1", rank=1, deed=Deed.FULL_DISK, from_window=3)
    plan = FaultPlan(trace=tmp_path / "trace", faults=(full,))
    answers = ranks.answers(
        2,
        "scenarios:train",
        environ={"SAMERUN_FAULTS": plan.to_text()},
        path=str(tmp_path / "run"),
        wrap="ddp",
        on_save_error=policy,
    )
    assert [answer["error"] for answer in answers] == ["SaveFailedError"] * 2
    edges = [max(line.window for line in read_traces(tmp_path / "trace") if line.rank == rank) for rank in (0, 1)]
    assert edges[0] == edges[1]
    if policy == "stop":
        assert all("No space left on device" in answer["text"] for answer in answers)
        assert 3 < edges[0] < 8
    else:  # goes on to the end, whose state cannot be kept
        assert all("the last state of the run could not be saved" in answer["text"] for answer in answers)
        assert edges[0] == 8
    events = read_events(tmp_path / "run" / "journal" / "000001.jsonl")
    assert [event["progress"]["updates"] for event in events if event["event"] == "saved"] == [0]
    entry = Store(tmp_path / "run").catalog().entries[0]
    assert int(entry.progress.updates) == 0


@pytest.mark.parametrize(("precision", "accumulate"), [("fp16", "sharded"), ("bf16", "unsharded")])
def test_precisions_and_accumulation(ranks: RankPool, tmp_path: Path, precision: str, accumulate: str) -> None:
    options = {"wrap": "fsdp", "precision": precision, "accumulate": accumulate}
    start(ranks, 2, tmp_path / "twin", tmp_path / "twin-trace", **options)
    for point in ("window:2.step", "window:5.microbatch:0"):
        start(ranks, 2, tmp_path / "run", tmp_path / "run-trace", at=point, **options)
    start(ranks, 2, tmp_path / "run", tmp_path / "run-trace", **options)
    assert differences(tmp_path / "twin-trace", tmp_path / "run-trace") == {}


@pytest.mark.parametrize(
    "component", ["weights", "buffers", "moments", "steps", "scheduler", "cursor", "rng", "ema", "loss", "samples"]
)
def test_control_a_component_left_out_is_named(ranks: RankPool, tmp_path: Path, component: str) -> None:
    """A checker that cannot fail is worthless: whatever a resume leaves out is named as the cause, and alone."""
    start(ranks, 2, tmp_path / "run", tmp_path / "trace", at="window:5.microbatch:0", wrap="ddp")
    plan = FaultPlan(trace=tmp_path / "trace", leave_out=(component,))
    ranks.run(2, "scenarios:train", environ={"SAMERUN_FAULTS": plan.to_text()}, path=str(tmp_path / "run"), wrap="ddp")
    assert causes(read_traces(tmp_path / "trace")) == [component]


def test_control_without_settled_buckets_four_ranks_differ(ranks: RankPool, tmp_path: Path) -> None:
    """DDP re-orders its buckets after its first backward; the throw-away backward of each attempt is what hides it."""
    start(ranks, 4, tmp_path / "twin", tmp_path / "twin-trace", wrap="ddp")
    start(ranks, 4, tmp_path / "run", tmp_path / "run-trace", at="window:5.step", wrap="ddp")
    plan = FaultPlan(trace=tmp_path / "run-trace")
    ranks.run(
        4,
        "scenarios:train_unsettled",
        environ={"SAMERUN_FAULTS": plan.to_text()},
        path=str(tmp_path / "run"),
        wrap="ddp",
    )
    assert "weights" in differences(tmp_path / "twin-trace", tmp_path / "run-trace")


def test_other_numbers_of_ranks_see_the_same_samples(ranks: RankPool, tmp_path: Path) -> None:
    """2 → 3 → 1 → 2 ranks: the same samples in the same windows, whoever reads them; streams are derived anew."""
    same = {"draw_in_body": False}  # what ranks draw for themselves cannot be dealt out to another number of them
    start(ranks, 2, tmp_path / "twin", tmp_path / "twin-trace", wrap="ddp", **same)
    for world_size, point in ((2, "window:2.step"), (3, "window:4.microbatch:0"), (1, "window:6.step")):
        wrap = "ddp" if world_size > 1 else "none"
        every = {"save_every": "1 updates", **same}
        start(ranks, world_size, tmp_path / "run", tmp_path / "run-trace", at=point, wrap=wrap, **every)
    start(ranks, 2, tmp_path / "run", tmp_path / "run-trace", wrap="ddp", **same)
    twin = {line.window: line for line in read_traces(tmp_path / "twin-trace") if line.rank == 0}
    for line in read_traces(tmp_path / "run-trace"):
        for component in ("cursor", "samples", "steps", "scheduler"):
            assert line.held[component] == twin[line.window].held[component], (component, line.window)
    differing = differences(tmp_path / "twin-trace", tmp_path / "run-trace")
    assert {"rng", "weights"} <= set(differing)  # and nobody claims otherwise: the start lines say "float tolerance"
    events = [e for f in sorted((tmp_path / "run" / "journal").glob("*.jsonl")) for e in read_events(f)]
    reasons = [" ".join(event["not_bitwise"]) for event in events if event["event"] == "started"]
    assert ["topology was" in reason for reason in reasons] == [False, True, True, True]


def test_what_a_plan_says_differently_on_other_ranks_is_said(ranks: RankPool, tmp_path: Path) -> None:
    plan = {"planned": True, "draw_in_body": False}
    start(ranks, 2, tmp_path / "run", tmp_path / "trace", at="window:4.step", wrap="ddp", **plan)
    start(ranks, 1, tmp_path / "run", tmp_path / "trace", **plan)
    files = sorted((tmp_path / "run" / "journal").glob("*.jsonl"))
    started = [event for file in files for event in read_events(file) if event["event"] == "started"]
    assert started[0]["plan_changes"] == []
    assert started[1]["plan_changes"] == ["batch.num_accumulated: 3 → 6", "batch.num_replicas: 2 → 1"]


def test_finished_run_says_so_and_trains_no_further(ranks: RankPool, tmp_path: Path) -> None:
    first = start(ranks, 1, tmp_path / "run", tmp_path / "trace", until=4)
    again = start(ranks, 1, tmp_path / "run", tmp_path / "trace", until=4)
    assert first is not None and again is not None
    assert again[0]["progress"] == first[0]["progress"]
    assert again[0]["losses"] == []
    more = start(ranks, 1, tmp_path / "run", tmp_path / "trace", until=6)
    assert more is not None and more[0]["progress"]["updates"] == 6
    shutil.rmtree(tmp_path / "run")
