from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import samerun
from samerun.errors import SchemaError, UsageError
from samerun.health.rollback import past
from samerun.health.rollback.decisions import (
    DecisionRecord,
    apply_quarantine,
    digest_of,
    quarantined,
    read_decisions,
    write_decision,
)
from samerun.health.rollback.good import Candidate, Suspect, consider, margin
from samerun.health.rollback.ladder import Action, Decided, Incident, Limits, Rung, Situation, Trigger, decide
from samerun.storage.memory import Memory

WINDOW_SAMPLES = 12
CANDIDATES = [
    Candidate(name=f"c{windows}", windows=windows, position=windows * WINDOW_SAMPLES, is_verified=True)
    for windows in range(0, 2200, 100)
]
UNRECOVERED = Incident(trigger=Trigger.UNRECOVERED, onset=2000, alarm=2003, now=2110)


def situation(**changed: Any) -> Situation:
    values: dict[str, Any] = {"candidates": CANDIDATES, "samples_per_window": WINDOW_SAMPLES, "good_until": 1990}
    return Situation(**{**values, **changed})


def action(rung: Rung = Rung.REWIND_SAME_DATA, **changed: Any) -> Action:
    values: dict[str, Any] = {"onset": 2000, "at_window": 1500, "farthest_window": 2110, "at_seconds": 0.0}
    return Action(rung=rung, **{**values, **changed})


def test_most_incidents_are_only_watched() -> None:
    found = decide(replace(UNRECOVERED, trigger=Trigger.SPIKE), situation())
    assert found.rung is Rung.OBSERVE


@pytest.mark.parametrize(
    ("in_a_row", "was_retried", "rung"),
    [(1, False, Rung.SKIP), (4, False, Rung.SKIP), (5, False, Rung.RETRY), (5, True, Rung.REWIND_SAME_DATA)],
)
def test_what_is_not_finite_climbs_one_rung_at_a_time(in_a_row: int, was_retried: bool, rung: Rung) -> None:
    incident = replace(UNRECOVERED, trigger=Trigger.NON_FINITE, in_a_row=in_a_row, was_retried=was_retried)
    assert decide(incident, situation()).rung is rung


def test_first_the_same_data_from_the_newest_good_checkpoint_before_the_margin() -> None:
    found = decide(UNRECOVERED, situation())
    assert found.rung is Rung.REWIND_SAME_DATA
    assert found.target is not None and found.target.name == "c1900"
    assert found.skip is None
    reasons = {one.candidate.name: one.why_not for one in found.considered}
    assert reasons["c2100"] is not None and "less than 100 windows before the onset" in reasons["c2100"]
    assert reasons["c1900"] is None


def test_then_a_skip_of_the_stated_range() -> None:
    found = decide(UNRECOVERED, situation(past=[action()]))
    assert found.rung is Rung.REWIND_AND_SKIP
    assert found.skip == (1950 * WINDOW_SAMPLES, 2153 * WINDOW_SAMPLES)  # onset − 50 to alarm + 150
    assert 200 <= (found.skip[1] - found.skip[0]) / WINDOW_SAMPLES <= 500  # the published scale


def test_then_a_person() -> None:
    past = [action(), action(Rung.REWIND_AND_SKIP, skipped=(23000, 24000))]
    found = decide(UNRECOVERED, situation(past=past))
    assert found.rung is Rung.STOP
    assert "did not help" in found.reason


def test_a_third_rewind_lowers_the_rate_only_where_it_was_allowed() -> None:
    past = [action(), action(Rung.REWIND_AND_SKIP, skipped=(23000, 24000))]
    found = decide(UNRECOVERED, situation(past=past), Limits(rewinds_per_region=4))
    assert (found.rung, found.rate_factor) == (Rung.REWIND_SKIP_LOWER_RATE, 0.5)
    found = decide(UNRECOVERED, situation(past=past), Limits(rewinds_per_region=3))
    assert found.rung is Rung.STOP  # the last rewind is not spent on an overlapping skip


def test_budgets_hold() -> None:
    elsewhere = [action(onset=onset, at_seconds=100.0) for onset in (100, 5000, 9000, 13000)]
    assert decide(UNRECOVERED, situation(past=elsewhere, seconds=200.0)).rung is Rung.STOP
    assert decide(UNRECOVERED, situation(past=elsewhere, seconds=90_000.0)).rung is Rung.REWIND_SAME_DATA
    few = situation(past=[action()], planned_samples=100_000)
    assert decide(UNRECOVERED, few).rung is Rung.STOP  # 1 % of them is less than the range
    assert decide(UNRECOVERED, replace(few, planned_samples=1_000_000)).rung is Rung.REWIND_AND_SKIP


def test_quiet_after_an_action() -> None:
    assert decide(UNRECOVERED, situation(past=[action(at_window=2000)])).rung is Rung.OBSERVE
    assert decide(UNRECOVERED, situation(past=[action(at_window=1910)])).rung is Rung.REWIND_AND_SKIP


def test_only_progress_beyond_the_farthest_gives_budget_back() -> None:
    spent = [action(), action()]
    assert decide(UNRECOVERED, situation(past=spent, good_until=2110)).rung is Rung.STOP
    assert decide(UNRECOVERED, situation(past=spent, good_until=2111)).rung is Rung.REWIND_SAME_DATA


def test_without_a_good_checkpoint_a_person() -> None:
    found = decide(UNRECOVERED, situation(candidates=CANDIDATES[20:]))
    assert found.rung is Rung.STOP
    assert len(found.considered) == 2


@given(
    st.lists(st.builds(action, rung=st.sampled_from(Rung), onset=st.integers(0, 4000)), max_size=8), st.integers(0, 40)
)
def test_however_it_is_asked_rewinds_are_bounded(past: list[Action], num_more: int) -> None:
    """Obeying every answer with no progress ends at a person after at most two more rewinds."""
    taken: list[Decided] = []
    for turn in range(num_more):
        found = decide(replace(UNRECOVERED, now=3000 + 1000 * turn), situation(past=past))
        taken.append(found)
        past = [*past, action(found.rung, skipped=found.skip, at_window=2000)]
    assert sum(found.rung.rewinds for found in taken) <= 2


def test_good_is_granted_late() -> None:
    newest, older = CANDIDATES[-1], CANDIDATES[-3]
    assert "only 10 of the 100" in str(consider([newest], onset=9999, now=2110, margin=0)[0].why_not)
    assert consider([older], onset=9999, now=2110, margin=0)[0].why_not is None
    assert "not verified" in str(
        consider([replace(older, is_verified=False)], onset=9999, now=2110, margin=0)[0].why_not
    )
    for suspect, is_good in ((Suspect(onset=1950), False), (Suspect(onset=1500, end=1800), True)):
        (found,) = consider([older], onset=9999, now=2110, margin=0, suspects=[suspect])
        assert (found.why_not is None) == is_good


def test_margin_is_the_memory_of_adam() -> None:
    assert [margin(beta2) for beta2 in (None, 0.95, 0.99, 0.999, 1.0)] == [100, 100, 200, 500, 100]


def record(**changed: Any) -> DecisionRecord:
    values: dict[str, Any] = {
        "action": "quarantine", "reason": "loss spike at window 13", "attempt": 2, "window": 13, "time": 1.7e9,
        "mode": "advise", "evidence": {"z": 12.5},
    }  # fmt: skip
    return DecisionRecord(**{**values, **changed})


def test_decisions_are_numbered_kept_and_read_back() -> None:
    storage = Memory()
    written = [write_decision(storage, record(skip=(10, 20))), write_decision(storage, record())]
    assert [one.number for one in written] == [1, 2]
    assert read_decisions(storage) == written
    past.write_outcome(storage, 1, {"came_back": True})
    assert read_decisions(storage) == written
    past.write_outcome(storage, 1, {"came_back": False})
    assert past.read_outcomes(storage) == {1: {"came_back": True}}  # the first word stands


def test_past_decisions_are_read_back_as_budget_and_only_what_was_carried_out_is_quarantined() -> None:
    found = decide(UNRECOVERED, situation(past=[action()]))
    evidence = {
        "incident": {"onset": 2000, "now": 2110, "trigger": "unrecovered"},
        "decided": found.to_json(),
        "check": {"until": found.check_until, "expected": found.expected},
    }
    rewind = record(action="rewind_and_skip", mode="act", evidence=evidence, skip=(23400, 25836), number=3)
    advice = record(action="rewind_same_data", mode="advise", evidence=evidence, number=4)
    by_hand = record(mode="operator", skip=(0, 7), number=5)
    everything = [rewind, advice, by_hand]
    (counted,) = past.actions(everything)
    assert counted == Action(
        rung=Rung.REWIND_AND_SKIP, onset=2000, at_window=1900, farthest_window=2110, at_seconds=1.7e9,
        skipped=(23400, 25836),
    )  # fmt: skip
    assert past.in_force(everything, {3: 2}) == everything
    for lost in ({}, {3: 1}):  # an older attempt decided it, and a newer one had taken over
        assert past.in_force(everything, lost) == [advice, by_hand]
    assert past.pending(everything, 2) == rewind
    assert past.pending(everything, 1) is None
    check = past.open_check(rewind)
    assert check is not None and check.until == found.check_until == 1950 + 100


def test_replicas_that_differ_go_back_to_the_last_equal_state_and_no_data_is_blamed() -> None:
    incident = replace(UNRECOVERED, trigger=Trigger.DESYNC, onset=1900, alarm=2000, now=2000)
    found = decide(incident, situation(past=[action(at_window=1990)]))  # no quiet time: bytes are no statistics
    assert (found.rung, found.skip) == (Rung.REWIND_SAME_DATA, None)
    assert found.target is not None and found.target.windows == 1900
    assert decide(incident, situation(past=[action(), action()])).rung is Rung.STOP
    assert decide(replace(incident, onset=-1), situation()).rung is Rung.STOP


def test_an_edited_decision_is_refused() -> None:
    storage = Memory()
    write_decision(storage, record(skip=(10, 20)))
    found = storage.get("decisions/000001.json", max_bytes=10_000)
    edited = found.data.replace(b"quarantine", b"quarantin\x65").replace(b"[10,20]", b"[10, 20]")
    storage.put_if_unchanged("decisions/000001.json", edited, found.version)
    with pytest.raises(SchemaError, match="000001"):
        read_decisions(storage)


@pytest.mark.parametrize("skip", [(5, 5), (-1, 3), (7, 3)])
def test_a_range_that_is_none_is_never_written(skip: tuple[int, int]) -> None:
    storage = Memory()
    with pytest.raises(UsageError, match="start < stop"):
        write_decision(storage, record(skip=skip))
    assert read_decisions(storage) == []


def test_the_union_of_ranges() -> None:
    records = [record(skip=pair) for pair in [(30, 40), (0, 7), (35, 50), (7, 9)]] + [record()]
    assert quarantined(records) == ((0, 9), (30, 50))
    assert digest_of(records) == digest_of([record(skip=(30, 50)), record(skip=(0, 9))]) != digest_of([])


def make_data() -> samerun.Data:
    return samerun.Data(list(range(1000)), global_batch=WINDOW_SAMPLES, micro_batch=3, seed=7)


def read_windows(data: samerun.Data, num_windows: int) -> list[int]:
    seen: list[int] = []
    windows = data.windows()
    for _ in range(num_windows):
        window = next(windows)
        for microbatch in window:
            seen += [sample for _, sample in microbatch.samples]
        data.commit(window)
    data.close()
    return seen


def test_a_resume_of_any_checkpoint_passes_over_the_same_samples() -> None:
    """Quarantine [120, 180): a fresh run, a resume before it, one inside it and one after it that had skipped."""
    order = read_windows(make_data(), 25)
    allowed = order[:120] + order[180:]
    fresh = make_data()
    assert apply_quarantine(fresh, [(120, 180)]) == [(120, 180)]
    assert read_windows(fresh, 20) == allowed[: 20 * WINDOW_SAMPLES]
    before = make_data()
    read_windows(before, 5)
    resumed = make_data()
    resumed.load_state_dict(before.state_dict())
    assert apply_quarantine(resumed, [(120, 180)]) == [(120, 180)]
    assert read_windows(resumed, 10) == allowed[60:180]
    again = make_data()
    again.load_state_dict(resumed.state_dict())
    assert apply_quarantine(again, [(120, 180)]) == []  # already in its state
    inside = make_data()
    read_windows(inside, 11)
    assert apply_quarantine(inside, [(120, 180)]) == [(132, 180)]
    assert read_windows(inside, 2) == order[180:204]


def test_control_without_it_the_quarantined_samples_are_read() -> None:
    order = read_windows(make_data(), 15)
    assert set(order[120:180]) & set(read_windows(make_data(), 15)) != set()


def test_a_source_that_cannot_skip_is_refused() -> None:
    class Other:
        def state_dict(self) -> dict[str, Any]:
            return {}

    assert apply_quarantine(Other(), []) == []
    with pytest.raises(UsageError, match="Other cannot pass over"):
        apply_quarantine(Other(), [(0, 5)])
