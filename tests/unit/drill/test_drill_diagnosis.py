"""Naming: what a run said is held against what was done to it; each silence and each wrong name is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samerun.drill.inside.diagnosis import Seen, checksum_windows, diagnose, not_possible, strikes
from samerun.drill.inside.judging import Evidence, judge, lost_updates
from samerun.drill.inside.points import TwinFacts
from samerun.drill.judgement import Kind
from samerun.health.rollback.decisions import DecisionRecord
from samerun.health.rollback.story import Standing, Story
from samerun.run.faults import Deed, Fault

FACTS = TwinFacts(num_windows=60, num_ranks=3, is_replicated=True, window_seconds=0.1)


def hit(deed: Deed, window: int, rank: int, name: str) -> dict[str, Any]:
    return {**Fault(at=f"window:{window}.microbatch:0", rank=rank, deed=deed).to_json(), "hit": name}


def story(**changed: Any) -> Story:
    decided = {"target": {"name": "u000000012-00000000", "windows": 12}}
    record = DecisionRecord(
        action="rewind_same_data", reason="r", attempt=1, window=18, time=0.0, mode="act", number=1,
        evidence={"tensors": ["model.module.a.weight"], "decided": decided},
    )  # fmt: skip
    values: dict[str, Any] = {"record": record, "standing": Standing.IN_FORCE, "outcome": {"came_back": False}}
    return Story(**{**values, **changed})


GOOD = Seen(
    hits=[
        hit(Deed.NON_FINITE, 1, 0, "module.tok"),
        hit(Deed.POISON, 40, 0, ""),
        hit(Deed.FLIP, 15, 1, "module.a.weight"),
    ],
    fired=[Fault(at="window:0.microbatch:0", rank=2, deed=Deed.SLOW, seconds=0.05).to_json()],
    events=[
        {"event": "skipped", "window": 1},
        {"event": "straggler", "straggler": {"rank": 2, "cause": "compute", "slow": 1.5}},
        {"event": "replicas_differ", "window": 18, "ranks": [1], "tensors": ["model.module.a.weight"]},
        {"event": "health", "kind": "spike", "window": 40, "onset": 40, "series": "loss", "z": 99.0},
    ],
    findings=[
        (0, {"event": "non_finite", "window": 1, "culprit": {"place": "output", "name": "tok"}}),
        (1, {"event": "non_finite", "window": 1, "culprit": None}),
    ],
    stories=[story()],
)


def test_all_four_are_named() -> None:
    found = diagnose(GOOD, FACTS)
    assert [one.is_named for one in found] == [True] * 4
    assert [one.fault.split(" in ")[0] for one in found] == [
        "a non-finite batch", "a poisoned batch", "a flipped bit", "a slow rank 2",
    ]  # fmt: skip


def without(kind: str) -> Seen:
    return replace(GOOD, events=[event for event in GOOD.events if event["event"] != kind])


def with_event(kind: str, **changed: Any) -> Seen:
    events = [{**event, **changed} if event["event"] == kind else event for event in GOOD.events]
    return replace(GOOD, events=events)


@pytest.mark.parametrize(
    ("seen", "unnamed"),
    [
        (without("skipped"), 0),
        (replace(GOOD, findings=[]), 0),
        (replace(GOOD, findings=[(1, GOOD.findings[0][1])]), 0),
        (replace(GOOD, findings=[(0, {**GOOD.findings[0][1], "culprit": {"place": "output", "name": "head"}})]), 0),
        (without("health"), 1),
        (with_event("health", onset=39), 1),
        (without("replicas_differ"), 2),
        (with_event("replicas_differ", ranks=[0]), 2),
        (with_event("replicas_differ", window=31), 2),
        (with_event("replicas_differ", tensors=["model.module.b.weight"]), 2),
        (replace(GOOD, stories=[]), 2),
        (replace(GOOD, stories=[story(), story()]), 2),
        (replace(GOOD, stories=[story(outcome={"came_back": True})]), 2),
        (replace(GOOD, stories=[story(outcome=None)]), 2),
        (replace(GOOD, stories=[story(standing=Standing.WAITING)]), 2),
        (without("straggler"), 3),
        (with_event("straggler", straggler={"rank": 1, "cause": "compute", "slow": 1.5}), 3),
    ],
)  # fmt: skip
def test_a_silence_or_a_wrong_name_is_noticed(seen: Seen, unnamed: int) -> None:
    assert [one.is_named for one in diagnose(seen, FACTS)] == [number != unnamed for number in range(4)]


def test_a_fault_that_was_not_named_fails_the_drill() -> None:
    evidence = Evidence(twin=[], run=[], twin_run=Path("a"), run_run=Path("b"), events=[])
    for seen, kind in ((GOOD, Kind.SAME), (without("straggler"), Kind.NOT_NAMED)):
        judged = judge(replace(evidence, diagnoses=diagnose(seen, FACTS)))
        assert judged.kind is kind
        assert int(judged.exit_code) == (0 if kind is Kind.SAME else 3)
        assert [one["named"] for one in judged.to_json()["diagnoses"]][-1] is (kind is Kind.SAME)


def test_two_replicas_name_the_tensor_and_the_pair() -> None:
    facts = replace(FACTS, num_ranks=2)
    pair = with_event("replicas_differ", ranks=[0, 1])
    assert [one.is_named for one in diagnose(replace(pair, fired=[]), facts)] == [True] * 3


def test_what_cannot_be_told_is_not_done_and_said() -> None:
    assert [fault.deed for fault in strikes(FACTS)] == [Deed.SLOW, Deed.FLIP]
    assert [fault.deed for fault in strikes(replace(FACTS, num_ranks=2))] == [Deed.FLIP]
    for facts, num_notes in (
        (FACTS, 0),
        (replace(FACTS, num_ranks=2), 1),
        (TwinFacts(num_windows=60, num_ranks=1), 2),
        (TwinFacts(num_windows=60, num_ranks=4, is_sharded=True), 1),
        (replace(FACTS, num_windows=13), 2),
        (replace(FACTS, is_even=False), 1),
    ):
        assert len(not_possible(facts)) == num_notes
    for num_windows in range(1, 200):
        for fault in strikes(replace(FACTS, num_windows=num_windows)):
            window = int(fault.at.removeprefix("window:").split(".")[0])
            assert window + checksum_windows(replace(FACTS, num_windows=num_windows)) < num_windows


def test_what_a_rewind_gave_up_is_no_lost_work() -> None:
    def saved(name: str, windows: int) -> dict[str, Any]:
        return {"event": "saved", "checkpoint": name, "progress": {"windows": windows, "updates": windows}}

    events = [
        {"event": "started", "attempt": 1, "progress": {"windows": 0, "updates": 0}},
        saved("a", 10), saved("b", 15),
        {"event": "started", "attempt": 2, "progress": {"windows": 10, "updates": 10}},
    ]  # fmt: skip
    assert lost_updates(events, [], {}, {1: 10}) == 0
    assert lost_updates(events, [], {}) == 5
