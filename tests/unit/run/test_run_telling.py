"""What a run says and remembers: start lines, surroundings, losses, coverage, last words, traces."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from samerun.core.component import Captured
from samerun.core.environ import Launcher
from samerun.core.progress import Progress
from samerun.errors import DoNotRestart, ExitCode, Refused, Stopped, UsageError
from samerun.run.ending import last_words
from samerun.run.history import Coverage, Losses
from samerun.run.starting.announce import describe, say
from samerun.run.starting.start import Passed, Started, StartKind
from samerun.run.starting.surroundings import surroundings, why_not_bitwise
from samerun.run.trace import Trace

PROGRESS = Progress.from_json({"windows": 9, "skipped": 2, "updates": 7, "samples": 63, "tokens": 500})


def started(kind: StartKind, **more: Any) -> Started:
    values = {"checkpoint": "u000000007-0000abcd", "restored": ("weights", "rng"), **more}
    return Started(kind=kind, run_id="id", attempt=3, progress=PROGRESS, **values)


def lines(start: Started, not_bitwise: list[str]) -> list[str]:
    return describe(start, path="runs/one", topology="2 ranks, DDP", not_bitwise=not_bitwise)


def test_a_fresh_start_is_one_line() -> None:
    fresh = Started(kind=StartKind.FRESH, run_id="id", attempt=1, progress=Progress())
    assert lines(fresh, []) == ["fresh run at runs/one (attempt 1; 2 ranks, DDP)"]


def test_a_resume_says_from_what_and_that_it_is_bitwise() -> None:
    assert lines(started(StartKind.RESUMED), []) == [
        "resumed runs/one at update 7, window 9, 63 samples from u000000007-0000abcd "
        "(attempt 3; 2 ranks, DDP; bitwise)",
        "  restored: weights rng",
    ]


def test_a_fall_back_says_why_and_what_is_not_promised() -> None:
    start = started(
        StartKind.FALLEN_BACK, passed=(Passed(name="u000000008-0000ffff", reason="a block is damaged"),),
        waived=("ema",),
    )  # fmt: skip
    said = lines(start, ["threads was 1, is 2"])
    assert said[0].startswith("fallen back runs/one at update 7")
    assert "within float tolerance" in said[0] and "bitwise" not in said[0]
    assert said[1:] == [
        "  not taken: u000000008-0000ffff: a block is damaged",
        "  not bitwise: threads was 1, is 2",
        "  restored: weights rng",
        "  NOT restored, as asked: ema",
    ]


def test_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    assert capsys.readouterr() == ("", "samerun: hello\n")


def test_equal_surroundings_are_bitwise_and_any_difference_is_named() -> None:
    now = surroundings(torch.device("cpu"))
    assert why_not_bitwise(now, now) == []
    for name in now:
        reasons = why_not_bitwise({**now, name: "other"}, now)
        assert reasons == [f"{name} was 'other', is {now[name]!r}"]
    assert why_not_bitwise({**now, "gpu": "H100"}, now) == ["gpu was 'H100', is None"]
    without = {name: value for name, value in now.items() if name != "numpy"}
    assert why_not_bitwise(without, now) == [f"numpy was None, is {now['numpy']!r}"]
    json.dumps(now, allow_nan=False)  # goes into every manifest


def test_settings_that_change_numbers_are_among_them() -> None:
    before = surroundings(torch.device("cpu"))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(not deterministic)
        assert len(why_not_bitwise(before, surroundings(torch.device("cpu")))) == 2
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def test_a_cuda_run_without_deterministic_kernels_is_not_promised_bitwise() -> None:
    facts: Mapping[str, Any] = {"device": "cuda", "deterministic": False}
    assert "deterministic kernels are off" in why_not_bitwise(facts, facts)[0]
    facts = {"device": "cuda", "deterministic": True}
    assert why_not_bitwise(facts, facts) == []


def test_the_best_evaluation_is_kept_by_its_direction() -> None:
    losses = Losses()
    found = [losses.evaluated("loss", value, better="min", update=u) for u, value in enumerate([3.0, 2.0, 2.0, 2.5])]
    assert found == [True, True, False, False]
    assert losses.evaluations["loss"] == {"last": 2.5, "best": 2.0, "best_update": 1}
    assert [losses.evaluated("acc", v, better="max", update=9) for v in (0.1, 0.3, 0.2)] == [True, True, False]
    assert not losses.evaluated("lr", 0.1, better=None, update=9)


def test_nan_is_never_the_best() -> None:
    losses = Losses()
    assert not losses.evaluated("loss", math.nan, better="min", update=1)
    assert losses.evaluated("loss", 5.0, better="min", update=2)
    assert not losses.evaluated("loss", math.nan, better="min", update=3)
    assert losses.evaluations["loss"]["best"] == 5.0


def test_an_unknown_direction_is_refused() -> None:
    with pytest.raises(UsageError, match="write better='min', better='max' or leave it out"):
        Losses().evaluated("loss", 1.0, better="lower", update=1)


def test_records_come_back_as_they_were() -> None:
    losses, again = Losses(), Losses()
    losses.evaluated("loss", 2.0, better="min", update=3)
    losses.last = 1.5
    again.write(losses.read())
    assert again.read() == losses.read()
    again.evaluated("loss", 1.0, better="min", update=4)
    assert losses.evaluations["loss"]["best"] == 2.0  # a copy, not the same table

    coverage, other = Coverage(digest=2**64 - 1, num_samples=7), Coverage()
    other.write(coverage.read())
    assert other == coverage


def launcher(error_file: str | None, rank: int = 0) -> Launcher:
    return Launcher(
        rank=rank, world_size=8, local_rank=0, restart_count=0, supervised=error_file is not None, error_file=error_file
    )


def test_last_words_are_found_in_the_last_round_only(tmp_path: Path) -> None:
    for attempt, rank, stop in (
        (0, 0, Refused("old")),
        (9, 0, Stopped("nine")),
        (10, 0, Stopped("saved")),
        (10, 1, DoNotRestart("newer")),
    ):
        file = tmp_path / "id" / f"attempt_{attempt}" / str(rank) / "error.json"
        last_words.leave(launcher(str(file), rank=4 + rank), stop)  # of the second node: folders count from 0 there
    found = [(word.rank, word.code, word.reason) for word in last_words.read_all(tmp_path)]
    assert found == [(4, ExitCode.STOPPED, "saved"), (5, ExitCode.DO_NOT_RESTART, "newer")]


def test_no_launcher_no_last_words(tmp_path: Path) -> None:
    last_words.leave(launcher(None), Stopped("saved"))
    assert last_words.read_all(tmp_path) == []


class Part:
    name = "mine"

    def __init__(self) -> None:
        self.captures = 0

    def capture(self) -> Captured:
        self.captures += 1
        return Captured(plain={"x": 1})

    def restore(self, source: Any) -> None:
        raise AssertionError


def test_a_trace_that_is_off_costs_no_capture(tmp_path: Path) -> None:
    part, trace = Part(), Trace(None, attempt=1, rank=0)
    trace.edge(PROGRESS, [part])
    trace.restored(PROGRESS, [part], {})
    trace.close()
    assert (trace.is_on, part.captures, list(tmp_path.iterdir())) == (False, 0, [])


def test_a_trace_is_a_line_an_edge_in_a_file_of_attempt_and_rank(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "new", attempt=3, rank=1)
    trace.restored(PROGRESS, [Part()], {"mine": {"x:": "1"}})
    trace.edge(PROGRESS, [Part()])
    trace.close()
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "attempt-000003.rank-00001.jsonl"
    restored, edge = map(json.loads, file.read_text().splitlines())
    assert (restored["kind"], restored["saved"]) == ("restored", {"mine": {"x:": "1"}})
    assert edge == {"kind": "edge", "progress": PROGRESS.to_json(), "held": {"mine": {"x:": "1"}}}
