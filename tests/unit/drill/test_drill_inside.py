"""From a scenario to its chapters, and from traces and journals to a verdict: every component left out is a cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from samerun.core.component import COMPONENTS
from samerun.drill.damage import Damage, Damaged
from samerun.drill.drilling import _require_known
from samerun.drill.inside.judging import Evidence, judge, lost_updates, restore_memory
from samerun.drill.inside.points import TwinFacts, parse_point, seeded_points, spread_windows
from samerun.drill.inside.scenarios import Scenario, Wish, chapters, standing_faults
from samerun.drill.judgement import Kind
from samerun.drill.traces import Line
from samerun.errors import UsageError
from samerun.run.faults import Deed

FACTS = TwinFacts(num_windows=40, num_ranks=2)


@pytest.mark.parametrize(
    ("text", "at", "from_window"),
    [
        ("window:13", "window:13.microbatch:0", 0),
        ("window:13.microbatch:2", "window:13.microbatch:2", 0),
        ("window:13.step", "window:13.step", 0),
        ("edge:0", "edge:0", 0),
        ("evaluate@4", "evaluate", 4),
        ("save:writing@9", "save:writing", 9),
        ("save:op:12", "save:op:12", 0),
        ("load", "load", 0),
    ],
)
def test_points_as_users_write_them(text: str, at: str, from_window: int) -> None:
    fault = parse_point(text, rank=1)
    assert (fault.at, fault.from_window, fault.rank, fault.deed) == (at, from_window, 1, Deed.KILL)


@pytest.mark.parametrize(
    "text", ["", "window", "window:x", "window:1.batch:2", "save:wrote", "save:op", "evaluated", "13"]
)
def test_what_names_no_point_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no point"):
        parse_point(text, rank=0)


def test_seeded_points_are_the_same_for_a_seed_ascend_and_lie_in_the_run() -> None:
    for seed in range(50):
        points = seeded_points(5, FACTS, seed=seed)
        assert points == seeded_points(5, FACTS, seed=seed)
        windows = [int(point.at.split(":")[1].split(".")[0]) for point in points]
        assert windows == sorted(windows) and windows[0] >= 1 and windows[-1] < 40
        assert all(0 <= point.rank < 2 for point in points)
    assert seeded_points(5, FACTS, seed=1) != seeded_points(5, FACTS, seed=2)
    assert len(seeded_points(3, TwinFacts(num_windows=1, num_ranks=1), seed=0)) == 3


def test_windows_are_spread_and_a_short_run_is_refused() -> None:
    assert spread_windows(3, FACTS) == [10, 20, 30]
    assert spread_windows(4, TwinFacts(num_windows=5, num_ranks=1)) == [1, 2, 3, 4]
    with pytest.raises(UsageError, match="train for longer"):
        spread_windows(5, TwinFacts(num_windows=5, num_ranks=1))


@pytest.mark.parametrize("scenario", list(Scenario))
def test_every_scenario_ends_with_an_uninterrupted_start(scenario: Scenario) -> None:
    found = chapters(scenario, Wish(sizes=(4, 2, 1)), FACTS)
    assert found[-1].is_last and not found[-1].faults
    assert not any(chapter.is_last for chapter in found[:-1])
    assert len(found) >= 3  # at least two resumes


def test_one_point_is_used_twice_so_that_a_resume_is_resumed() -> None:
    found = chapters(Scenario.CONTINUITY, Wish(points=("window:7",)), FACTS)
    assert [chapter.faults[0].at for chapter in found[:-1]] == ["window:7.microbatch:0"] * 2


def test_a_single_process_never_strikes_its_parent() -> None:
    """Its parent may be the drill, or the user's shell."""
    for scenario in Scenario:
        found = chapters(scenario, Wish(sizes=(2, 1)), TwinFacts(num_windows=40, num_ranks=1))
        deeds = {fault.deed for chapter in found for fault in chapter.faults}
        assert not deeds & {Deed.KILL_LAUNCHER, Deed.TERM_LAUNCHER}


def test_the_newest_checkpoint_is_damaged_in_every_way() -> None:
    found = chapters(Scenario.DAMAGE, Wish(), FACTS)
    assert [chapter.damage for chapter in found] == [None, *Damage, None]


def test_topology_names_each_number_of_ranks_and_needs_two() -> None:
    found = chapters(Scenario.TOPOLOGY, Wish(sizes=(4, 2, 1)), FACTS)
    assert [chapter.nproc for chapter in found] == [4, 2, 1]
    with pytest.raises(UsageError, match="at least two"):
        chapters(Scenario.TOPOLOGY, Wish(), FACTS)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--rank 2"):
        chapters(Scenario.CONTINUITY, Wish(rank=2), FACTS)


def test_a_bad_batch_is_there_for_the_twin_too() -> None:
    assert [fault.deed for fault in standing_faults(Scenario.FAULTS, Wish())] == [Deed.NON_FINITE, Deed.POISON]
    assert standing_faults(Scenario.CONTINUITY, Wish()) == ()


def line(window: int, *, attempt: int = 1, rank: int = 0, kind: str = "edge", **changed: str) -> Line:
    held: Mapping[str, Mapping[str, str]] = {name: {"k": changed.get(name, f"x{window}")} for name in COMPONENTS}
    saved = {name: {"k": f"x{window}"} for name in COMPONENTS} if kind == "restored" else None
    return Line(kind=kind, attempt=attempt, rank=rank, window=window, update=window, held=held, saved=saved)


def judged(run: list[Line], **more: Any) -> Any:
    twin = [line(window) for window in range(5)]
    given = {"events": (), **more}
    return judge(Evidence(twin=twin, run=run, twin_run=Path("/nowhere/a"), run_run=Path("/nowhere/b"), **given))


def resumed(**changed: str) -> list[Line]:
    """Interrupted in window 3, resumed from 2 with `changed` components."""
    first = [line(window) for window in range(3)]
    then = [line(2, attempt=2, kind="restored", **changed), line(2, attempt=2, **changed)]
    return [*first, *then, *(line(window, attempt=2, **changed) for window in (3, 4))]


def test_a_run_that_came_back_is_the_same() -> None:
    judgement = judged(resumed())
    assert (judgement.kind, judgement.cause, judgement.exit_code) == (Kind.SAME, [], 0)


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_left_out_is_named_as_the_cause(name: str) -> None:
    judgement = judged(resumed(**{name: "xfresh"}))
    assert judgement.kind is (Kind.DRIFT if name == "rng" else Kind.WRONG)
    assert judgement.cause == [name]
    assert judgement.components[name].update == 2
    assert judgement.exit_code == 3


@pytest.mark.parametrize(("name", "kind"), [("weights", Kind.DRIFT), ("loss", Kind.DRIFT), ("samples", Kind.WRONG)])
def test_what_goes_apart_later_is_drift_or_wrong(name: str, kind: Kind) -> None:
    run = [*resumed()[:-1], line(4, attempt=2, **{name: "xother"})]
    judgement = judged(run)
    assert (judgement.kind, judgement.cause) == (kind, [])


def started(attempt: int, updates: int, checkpoint: str | None = None) -> dict[str, Any]:
    progress = {"updates": updates, "windows": updates}
    return {"event": "started", "attempt": attempt, "progress": progress, "checkpoint": checkpoint}


def saved(updates: int, checkpoint: str) -> dict[str, Any]:
    return {"event": "saved", "checkpoint": checkpoint, "progress": {"updates": updates, "windows": updates}}


def test_resuming_from_less_than_was_saved_is_lost_work() -> None:
    events = [started(1, 0), saved(5, "a"), saved(10, "b"), started(2, 5, "a")]
    judgement = judged(resumed(), events=events)
    assert (judgement.kind, judgement.lost_updates) == (Kind.LOST_WORK, 5)
    assert lost_updates([*events[:-1], started(2, 10, "b")], (), {}) == 0
    assert lost_updates(events, [Damaged(checkpoint="b", what="")], {}) == 0


def test_doing_again_what_there_was_warning_to_save_is_lost_work() -> None:
    events = [started(1, 0), saved(5, "a"), started(2, 5, "a")]
    assert lost_updates(events, (), {1: 8}) == 3
    assert lost_updates(events, (), {1: 5}) == 0


def test_loading_a_damaged_checkpoint_is_wrong() -> None:
    events = [started(1, 0), started(2, 2, "bad")]
    assert judged(resumed(), events=events, damaged=[Damaged(checkpoint="bad", what="")]).kind is Kind.WRONG
    assert judged(resumed(), events=events, damaged=[Damaged(checkpoint="other", what="")]).kind is Kind.SAME


def test_a_bad_batch_that_was_not_skipped_is_wrong() -> None:
    assert judged(resumed(), bad_window=1).kind is Kind.WRONG
    skipped = [{"event": "skipped", "window": 1}]
    assert judged(resumed(), bad_window=1, events=skipped).kind is Kind.SAME


def test_across_numbers_of_ranks_streams_are_not_compared_and_samples_are_exact() -> None:
    assert judged(resumed(rng="xnew"), tolerance=1e-4).kind is Kind.SAME
    assert judged(resumed(samples="xnew"), tolerance=1e-4).kind is Kind.WRONG
    assert judged([*resumed()[:-1], line(4, attempt=2, weights="xo")], tolerance=1e-4).kind is Kind.DRIFT


def test_the_memory_of_a_restore_is_stated_for_each_start_that_restored() -> None:
    mib = 1 << 20
    events = [
        {"event": "started", "attempt": 1, "checkpoint": None},
        {"event": "memory", "ranks": [[[100, 100], [100, 100]]]},
        {"event": "started", "attempt": 2, "checkpoint": "u4"},
        {"event": "memory", "ranks": [[[300 * mib, 310 * mib], [340 * mib, 364 * mib]], [[200 * mib] * 2] * 2]},
        {"event": "started", "attempt": 3, "checkpoint": "u6"},
        {"event": "memory", "ranks": [[None, None]]},  # no /proc
    ]
    (line,) = restore_memory(events)
    assert line.startswith("attempt 2 on 2 rank(s): at most 64") and "above 300" in line


def test_what_is_not_there_cannot_be_left_out() -> None:
    with pytest.raises(UsageError, match="--break momentum: this run has no such component; it has weights"):
        _require_known(["weights", "momentum"], [Line(kind="edge", attempt=1, rank=0, window=0, update=0,
                                                      held={"weights": {}}, saved=None)])  # fmt: skip
