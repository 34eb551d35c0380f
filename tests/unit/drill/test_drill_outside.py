"""From outside: what each start goes through, what is damaged, what a difference means after damage or a warning."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samerun.drill.inside.scenarios import Scenario
from samerun.drill.judgement import Kind
from samerun.drill.outside.acts import Act, Observed, acts
from samerun.drill.outside.compare import Difference, Nature
from samerun.drill.outside.hurting import Hurt, hurt_newest
from samerun.drill.outside.judging import Evidence, judge
from samerun.drill.outside.outputs import leaves
from samerun.drill.outside.steps import done_again
from samerun.drill.outside.triggers import When
from samerun.drill.processes import Blow, run_once
from samerun.errors import UsageError

SEEN = Observed(seconds=10.0, first_file_seconds=2.0, num_events=40)


def blows(planned: list[Act]) -> list[Blow | None]:
    return [act.interruption.blow if act.interruption else None for act in planned]


@pytest.mark.parametrize("scenario", list(Scenario))
def test_every_scenario_ends_with_a_start_that_nothing_interrupts(scenario: Scenario, tmp_path: Path) -> None:
    planned = acts(scenario, When(watch=tmp_path), SEEN, sizes=(4, 2, 1))
    assert len(planned) >= 3
    assert planned[-1] == Act(nproc=1)


def test_preempt_knows_every_way_unless_points_are_named(tmp_path: Path) -> None:
    drawn = blows(acts(Scenario.PREEMPT, When(watch=tmp_path), SEEN, sizes=(1,)))
    assert set(drawn[:-1]) == {Blow.TERM, Blow.TERM_RANK, Blow.TERM_THEN_KILL, Blow.KILL, Blow.KILL_MAIN}
    named = blows(acts(Scenario.PREEMPT, When(patterns=("step 5",)), SEEN, sizes=(1,)))
    assert named == [Blow.TERM, Blow.TERM, None]


@pytest.mark.parametrize("num_events", [1, 3, 40, 5000])
def test_crash_counts_up_and_asks_for_no_more_events_than_the_twin_had(num_events: int, tmp_path: Path) -> None:
    seen = replace(SEEN, num_events=num_events)
    planned = acts(Scenario.CRASH, When(watch=tmp_path), seen, sizes=(1,))[:-1]
    numbers = [act.interruption.number for act in planned]  # type: ignore[union-attr]
    assert numbers == sorted(set(numbers)) and 0 < sum(numbers) <= num_events
    assert num_events > 100 or numbers == list(range(1, len(numbers) + 1))


def test_crash_without_any_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none where --watch looks"):
        acts(Scenario.CRASH, When(watch=tmp_path), replace(SEEN, num_events=0), sizes=(1,))


def test_topology_gives_each_start_its_number_of_ranks_and_needs_two() -> None:
    assert [act.nproc for act in acts(Scenario.TOPOLOGY, When(), SEEN, sizes=(4, 2, 1))] == [4, 2, 1]
    with pytest.raises(UsageError, match="two numbers of ranks"):
        acts(Scenario.TOPOLOGY, When(), SEEN, sizes=(4,))


def test_starts_share_the_work_so_that_every_interruption_comes() -> None:
    planned = acts(Scenario.DAMAGE, When(), SEEN, sizes=(1,))
    worked = [act.interruption.after_seconds - 2.0 for act in planned[:-1]]  # type: ignore[union-attr]
    assert all(seconds > 0 for seconds in worked) and sum(worked) < 8.0
    assert [act.hurt for act in planned] == [None, *Hurt, None]


@pytest.mark.parametrize("hurt", list(Hurt))
def test_the_largest_file_of_the_newest_save_is_damaged_and_nothing_else(tmp_path: Path, hurt: Hurt) -> None:
    for name, size, age in (("old.pt", 900, 60), ("new.pt", 500, 0), ("meta.json", 9, 0), ("steps.jsonl", 2000, 0)):
        (tmp_path / name).write_bytes(b"0" * size)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    said = hurt_newest(tmp_path, hurt, but=[Path("steps.jsonl")])
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert said == f"new.pt (500 bytes): {hurt.value}"
    assert {name for name in before if before[name] != after.get(name)} == {"new.pt"}


def test_nothing_to_damage_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    assert hurt_newest(tmp_path, Hurt.FLIP) is None


EVIDENCE = Evidence(
    files=(), steps=(), saved_leaves=frozenset(), last_step=9, num_done_again=5, num_after_warning=0, began_over=False,
    was_damaged=False, saved_before_kills=True, notes=(),
)  # fmt: skip
ODD = Difference(path="state.pt/w", nature=Nature.NUMBER, size=1e-3)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, Kind.SAME),
        ({"num_after_warning": 2}, Kind.LOST_WORK),
        ({"files": (ODD,)}, Kind.DRIFT),
        ({"files": (ODD,), "was_damaged": True}, Kind.WRONG),
        ({"was_damaged": True}, Kind.SAME),
    ],
)
def test_what_a_difference_means(change: dict[str, Any], kind: Kind) -> None:
    assert judge(replace(EVIDENCE, **change)).kind is kind


def test_only_what_follows_a_warning_counts_against_it() -> None:
    starts = [[{"step": step} for step in steps] for steps in ((1, 2, 3), (3, 4, 5), (4, 5, 6))]
    assert done_again(starts) == 3
    assert done_again(starts, after=[True, False, False]) == 1
    assert done_again(starts, after=[False, True, False]) == 2


def test_a_disk_that_fails_is_no_other_format(tmp_path: Path) -> None:
    """A reader may not know a file; that its bytes cannot be read must not pass as a digest."""
    (tmp_path / "state.json").mkdir()
    with pytest.raises(IsADirectoryError):
        leaves(tmp_path, Path("state.json"))
    (tmp_path / "other.pt").write_bytes(b"junk that is no archive")
    assert len(leaves(tmp_path, Path("other.pt"))) == 1


def test_a_full_disk_fails_writes_beyond_the_limit(tmp_path: Path) -> None:
    code = (
        f"import time; time.sleep(0.2); open({str(tmp_path / 'big')!r}, 'wb', 0).write(b'x' * 100_000) == 1000 or 1/0"
    )
    ended = run_once(
        [sys.executable, "-c", code], environ={}, log=tmp_path / "log", timeout_seconds=30, max_file_bytes=1000
    )
    assert ended.exit_code == 0, ended.tail()
    assert (tmp_path / "big").stat().st_size == 1000
