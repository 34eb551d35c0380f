"""Health inside a run: injected faults are named, state stays safe, nothing of it changes the training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rank_pool import RankError, RankPool
from samerun.core.events import read_events
from samerun.drill.traces import first_differences, read_traces
from samerun.health.records.event import MAX_LINE_BYTES, read_records
from samerun.health.rollback.quarantine import quarantine
from samerun.run.faults import Deed, Fault, FaultPlan


def train(pool: RankPool, world_size: int, path: Path, *, plan: FaultPlan | None = None, **options: Any) -> list[Any]:
    environ = {"SAMERUN_FAULTS": plan.to_text()} if plan is not None else None
    return pool.run(world_size, "health_scenarios:train", environ=environ, path=str(path), **options)


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    files = sorted((path / "journal").glob("*.jsonl"))
    return [event for file in files for event in read_events(file) if event["event"] == kind]


def findings(path: Path, rank: int) -> list[dict[str, Any]]:
    file = path / "health" / "000001" / f"rank-{rank:05d}.findings.jsonl"
    return read_events(file) if file.exists() else []


def test_each_rank_leaves_one_short_record_a_window(ranks: RankPool, tmp_path: Path) -> None:
    train(ranks, 2, tmp_path / "run", until=9)
    for rank in (0, 1):
        file = tmp_path / "run" / "health" / "000001" / f"rank-{rank:05d}.windows.jsonl"
        assert max(map(len, file.read_bytes().splitlines()[1:])) < MAX_LINE_BYTES
        found = read_records(file)
        assert found.head["rank"] == rank
        assert [record.window for record in found.records] == list(range(9))
        assert [(record.start, record.end) for record in found.records] == [(8 * i, 8 * i + 8) for i in range(9)]
        for record in found.records:
            assert record.outcome == "updated"
            assert record.compute_seconds > 0 and record.wait_seconds > 0 and record.memory_bytes > 2**20
            spent = record.compute_seconds + record.wait_seconds + record.data_seconds
            assert spent == pytest.approx(record.window_seconds, abs=1e-5)


def test_health_changes_nothing_in_the_training(ranks: RankPool, tmp_path: Path) -> None:
    for mode in ("off", "observe", "advise"):
        plan = FaultPlan(trace=tmp_path / f"{mode}-trace")
        train(ranks, 2, tmp_path / mode, plan=plan, until=12, health=mode)
    assert not (tmp_path / "off" / "health").exists()
    for mode in ("observe", "advise"):
        found = first_differences(read_traces(tmp_path / "off-trace"), read_traces(tmp_path / f"{mode}-trace"))
        unlike = {name for name, first in found.items() if first is not None}
        assert unlike <= {"loss"}  # which holds what the detector remembers


def test_a_slow_rank_of_four_is_named(ranks: RankPool, tmp_path: Path) -> None:
    train(ranks, 4, tmp_path / "run", until=41, slow_rank=2, slow_seconds=0.05)
    found = events(tmp_path / "run", "straggler")
    named = [event["straggler"] for event in found if event["straggler"]]
    assert {score["rank"] for score in named} == {2}  # in one of two reports at least: the cores are shared
    assert named[0]["cause"] == "compute"
    assert named[0]["cost"] > 0.02


def test_control_equal_ranks_are_not_called_slow_for_good(ranks: RankPool, tmp_path: Path) -> None:
    """Shared cores make real differences; none may last."""
    train(ranks, 4, tmp_path / "run", until=41)
    assert not any(event["lasts"] for event in events(tmp_path / "run", "straggler"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_module_behind_a_bad_loss_is_named_on_the_rank_that_had_it(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    done = train(ranks, world_size, tmp_path / "run", until=7, zero_at=4, zero_rank=world_size - 1)
    assert [result["reasons"] for result in done] == [
        ["updated"] * 4 + ["non_finite_loss"] + ["updated"] * 2
    ] * world_size
    (guilty,) = findings(tmp_path / "run", world_size - 1)
    assert (guilty["window"], guilty["culprit"]["place"], guilty["culprit"]["name"]) == (4, "output", "1")
    assert guilty["culprit"]["kind"] == "Divides"
    for rank in range(world_size - 1):
        (innocent,) = findings(tmp_path / "run", rank)
        assert innocent["culprit"] is None
    assert all(math.isfinite(loss) for i, loss in enumerate(done[0]["losses"]) if i != 4)


def test_one_flipped_bit_in_one_replica_is_found_and_its_rank_named(ranks: RankPool, tmp_path: Path) -> None:
    train(ranks, 3, tmp_path / "run", until=12, flip_rank=1)
    first, *_ = events(tmp_path / "run", "replicas_differ")
    assert first["window"] == 5  # the first comparison after window 3
    assert first["ranks"] == [1]
    assert "model.module.3.weight" in first["tensors"]
    dump = json.loads((tmp_path / "run" / "health" / "000001" / "rank-00001.flight.json").read_text())
    assert dump["reason"] == "replicas differ"


def test_control_sound_replicas_never_differ(ranks: RankPool, tmp_path: Path) -> None:
    train(ranks, 3, tmp_path / "run", until=12)
    assert events(tmp_path / "run", "replicas_differ") == []


def test_a_spike_is_told_and_a_shift_gets_advice_that_is_written_first(ranks: RankPool, tmp_path: Path) -> None:
    train(ranks, 1, tmp_path / "run", until=900, spike_from=700, health="advise", save_every="100 updates")
    found = events(tmp_path / "run", "health")
    alarm = next(event for event in found if event["kind"] == "spike" and event["is_certain"])
    assert (alarm["window"], alarm["onset"]) == (700, 700)
    assert {event["kind"] for event in found if event["window"] > 750} & {"shifted", "diverging", "unrecovered"}
    record = json.loads((tmp_path / "run" / "decisions" / "000001.json").read_text())
    assert (record["mode"], record["action"]) == ("advise", "rewind_same_data")
    assert record["evidence"]["decided"]["target"] is not None


def test_each_kind_of_fault_is_told_apart_by_computing_again(ranks: RankPool, tmp_path: Path) -> None:
    faults = {"4": [1, "transient"], "6": [2, "persistent"], "8": [0, "varies"], "10": [1, "data"], "12": [2, "state"]}
    ranks.run(3, "health_scenarios:blame", path=str(tmp_path / "run"), faults=faults, until=13)
    told = events(tmp_path / "run", "blame")
    found = {event["window"]: (event["blame"], event["evidence"]["suspect"]) for event in told}
    assert found[4] == ("transient hardware", 1)
    assert found[6] == ("persistent hardware", 2)
    assert found[8] == ("unresolved", 0)
    assert found[10] == ("data at this position", 1)
    assert found[12][0] == "corrupt state"
    assert sorted(found) == [4, 6, 8, 10, 12]  # and nothing in between is blamed


def test_one_process_alone_finds_what_did_not_come_out_twice_the_same(ranks: RankPool, tmp_path: Path) -> None:
    faults = {"4": [0, "transient"], "6": [0, "persistent"], "8": [0, "data"]}
    ranks.run(1, "health_scenarios:blame", path=str(tmp_path / "run"), faults=faults, until=10)
    found = {event["window"]: event["blame"] for event in events(tmp_path / "run", "blame")}
    assert found == {4: "transient hardware", 8: "data at this position"}  # nobody to compare a lasting fault with


def test_looking_again_changes_nothing_in_the_training(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("off", "on"):
        plan = FaultPlan(trace=tmp_path / f"{name}-trace", health={"replay_windows": 1} if name == "on" else {})
        train(ranks, 2, tmp_path / name, plan=plan, until=7)
    found = first_differences(read_traces(tmp_path / "off-trace"), read_traces(tmp_path / "on-trace"))
    assert [name for name, first in found.items() if first is not None] == []


@pytest.mark.parametrize("broken", ["spike", "records", "straggler", "replay"])
def test_a_part_that_raises_costs_no_training(ranks: RankPool, tmp_path: Path, broken: str) -> None:
    plan = FaultPlan(health={"replay_windows": 5} if broken == "replay" else {})
    done = train(ranks, 2, tmp_path / "run", plan=plan, until=25, broken=broken)
    assert done[0]["progress"]["updates"] == 25
    assert done[0]["losses"] == train(ranks, 2, tmp_path / "twin", until=25)[0]["losses"]


def test_a_crash_and_a_stop_leave_the_flight_recorder(ranks: RankPool, tmp_path: Path) -> None:
    for deed, kind in ((Deed.RAISE, "FaultError"), (Deed.TERM, "Stopped")):
        plan = FaultPlan(faults=(Fault(at="window:5.step", rank=0, deed=deed),))
        with pytest.raises(RankError) as raised:
            train(ranks, 1, tmp_path / kind, plan=plan, until=20)
        assert raised.value.kind == kind
        dump = json.loads((tmp_path / kind / "health" / "000001" / "rank-00000.flight.json").read_text())
        assert dump["reason"].startswith(kind)
        assert [values[0] for values in dump["records"]][:5] == list(range(5))
        assert (len(dump["records"]) == 5) == (deed is Deed.RAISE)  # a stop lets its window end first
        assert dump["stacks"]


def test_a_resumed_run_remembers_what_its_twin_remembers(ranks: RankPool, tmp_path: Path) -> None:
    options = {"until": 60, "save_every": "10 updates"}
    twin = FaultPlan(trace=tmp_path / "twin-trace")
    train(ranks, 2, tmp_path / "twin", plan=twin, **options)
    faults = tuple(Fault(at="window:43.step", rank=rank, deed=Deed.RAISE) for rank in (0, 1))
    with pytest.raises(RankError, match="planned"):
        train(ranks, 2, tmp_path / "run", plan=FaultPlan(trace=tmp_path / "trace", faults=faults), **options)
    train(ranks, 2, tmp_path / "run", plan=FaultPlan(trace=tmp_path / "trace"), **options)
    found = first_differences(read_traces(tmp_path / "twin-trace"), read_traces(tmp_path / "trace"))
    assert [name for name, first in found.items() if first is not None] == []


def test_quarantined_samples_are_not_read_again(ranks: RankPool, tmp_path: Path) -> None:
    train(ranks, 1, tmp_path / "run", until=5, save_every="1 updates")
    quarantine(tmp_path / "run", 24, 32, reason="a bad shard")
    train(ranks, 1, tmp_path / "run", until=9, save_every="1 updates")
    (applied,) = events(tmp_path / "run", "quarantine")
    assert applied["ranges"] == [[24, 32]]
    file = tmp_path / "run" / "health" / "000002" / "rank-00000.windows.jsonl"
    assert [(r.start, r.end) for r in read_records(file).records] == [(20, 24), (24, 36), (36, 40), (40, 44)]


def test_a_mode_that_does_not_exist(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="'observe'"):
        train(ranks, 1, tmp_path / "run", until=1, health="react")
