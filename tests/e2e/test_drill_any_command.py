"""Drills of commands that know nothing of samerun: ways to resume wrongly are found, bad commands are bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from samerun.drill.drilling import Order, drill
from samerun.drill.inside.scenarios import Scenario, Wish
from samerun.drill.judgement import Judgement, Kind
from samerun.drill.outside.triggers import When
from samerun.drill.starting import Command
from samerun.errors import UsageError

TRAINER = str(Path(__file__).with_name("plain_trainer.py"))


def drilled(
    place: Path,
    *arguments: str,
    when: When | None = None,
    scenario: Scenario = Scenario.CONTINUITY,
    log: bool = True,
    timeout_seconds: float = 60.0,
    grace_seconds: float = 10.0,
) -> Judgement:
    place.mkdir(exist_ok=True)
    order = Order(
        scenario=scenario,
        command=Command(
            words=[sys.executable, TRAINER, "{out}", *arguments],
            timeout_seconds=timeout_seconds,
            grace_seconds=grace_seconds,
        ),
        wish=Wish(),
        when=when or When(patterns=("step 5$", "step 8$")),
        log=Path("steps.jsonl") if log else None,
    )
    told = drill(order, place, lambda name, done: None)
    assert json.loads((place / "drill.json").read_text()) == told.to_json()
    return told.judgement


def test_a_trainer_that_saves_everything_is_the_same(tmp_path: Path) -> None:
    judgement = drilled(tmp_path)
    assert (judgement.kind, judgement.problem, judgement.notes) == (Kind.SAME, None, [])
    assert set(judgement.components) >= {"weights", "scheduler", "rng", "cursor"}
    starts = json.loads((tmp_path / "drill.json").read_text())["starts"]
    assert [start["exit_code"] for start in starts] == [-9, -9, 0]
    assert starts[1]["first_update"] in (4, 7)  # from the last save, which the kill may have let through
    shell = (tmp_path / "starts.sh").read_text().splitlines()
    assert sum(TRAINER in line for line in shell) == 5


@pytest.mark.parametrize(
    ("forgotten", "kind", "component"),
    [
        ("rng", Kind.DRIFT, "loss"),
        ("weights", Kind.DRIFT, "weights"),
        ("position", Kind.WRONG, "samples"),
        ("step", Kind.WRONG, "samples"),
    ],
)
def test_what_is_forgotten_is_found_at_the_first_update_after_the_resume(
    tmp_path: Path, forgotten: str, kind: Kind, component: str
) -> None:
    judgement = drilled(tmp_path, "--forget", forgotten)
    assert judgement.kind is kind, judgement
    first = judgement.components[component]
    assert first is not None
    if component != "weights" and forgotten != "step":
        assert first.update in (4, 7)


def test_a_rng_that_is_saved_nowhere_is_suspected(tmp_path: Path) -> None:
    place = tmp_path / "place"
    script = tmp_path / "train.py"
    text = Path(TRAINER).read_text().replace('"rng": [version, list(words), gauss]', "")
    script.write_text(text.replace('if "rng" not in options.forget:', "if False:"))
    place.mkdir()
    order = Order(
        scenario=Scenario.CONTINUITY,
        command=Command(words=[sys.executable, str(script), "{out}"], timeout_seconds=60),
        wish=Wish(),
        when=When(patterns=("step 5$",)),
        log=Path("steps.jsonl"),
    )
    judgement = drill(order, place, lambda name, done: None).judgement
    assert judgement.kind is Kind.DRIFT
    assert judgement.suspected == ["moments", "rng"]


def test_never_saving_is_lost_work(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--fault", "never-saves")
    assert judgement.kind is Kind.LOST_WORK, judgement
    assert judgement.lost_updates is not None and judgement.lost_updates >= 5
    assert "had written no file" in " ".join(judgement.notes)


@pytest.mark.soak
def test_damage_without_anything_to_damage_proves_nothing(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--fault", "never-saves", scenario=Scenario.DAMAGE)
    assert judgement.kind is Kind.CANNOT_TELL and "could be damaged" in str(judgement.problem)


def test_sigterm_that_is_not_answered_by_a_save_is_lost_work(tmp_path: Path) -> None:
    judgement = drilled(tmp_path / "deaf", scenario=Scenario.PREEMPT)
    assert judgement.kind is Kind.LOST_WORK
    assert judgement.lost_updates is not None and judgement.lost_updates > 0
    assert drilled(tmp_path / "saves", "--fault", "saves-on-term", scenario=Scenario.PREEMPT).kind is Kind.SAME


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario.DAMAGE,
        pytest.param(Scenario.CRASH, marks=pytest.mark.soak),
        pytest.param(Scenario.FAULTS, marks=pytest.mark.soak),
    ],
)
def test_every_scenario_that_makes_sense_from_outside(tmp_path: Path, scenario: Scenario) -> None:
    """The trainer renames whole files, keeps two, and passes over one that does not parse: it comes through all."""
    judgement = drilled(tmp_path, "--fault", "careful", "--steps", "40", when=When(seed=1), scenario=scenario)
    assert judgement.kind in (Kind.SAME, Kind.LOST_WORK), judgement
    told = json.loads((tmp_path / "drill.json").read_text())
    assert len(told["interruptions"]) >= 2, told
    if scenario is Scenario.DAMAGE:
        assert "one bit flipped in the middle" in " ".join(told["interruptions"])


def test_all_ways_to_stop_from_outside(tmp_path: Path) -> None:
    judgement = drilled(
        tmp_path, "--fault", "saves-on-term", "--steps", "60", when=When(seed=1), scenario=Scenario.PREEMPT
    )
    assert judgement.kind is Kind.SAME, judgement
    told = json.loads((tmp_path / "drill.json").read_text())
    said = " ".join(told["interruptions"])
    for way in ("to the process group 0", "one rank alone", "at once after it", "own process alone", "at file event"):
        assert way in said, told["interruptions"]


def test_a_script_that_is_not_deterministic_is_measured_by_its_twins(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--fault", "unseeded", "--forget", "rng")
    assert "not deterministic: loss" in " ".join(judgement.notes)
    assert judgement.kind in (Kind.SAME, Kind.DRIFT)


@pytest.mark.parametrize(("fault", "kind"), [("crashes", Kind.CRASHED), ("hangs", Kind.HUNG)])
def test_a_resume_that_fails(tmp_path: Path, fault: str, kind: Kind) -> None:
    judgement = drilled(tmp_path, "--fault", fault, timeout_seconds=4.0)
    assert judgement.kind is kind
    assert "start 2 of the run" in str(judgement.problem)
    assert ("cannot resume" if fault == "crashes" else "--timeout") in str(judgement.problem)


def test_a_command_that_wants_a_terminal_is_told_apart(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--fault", "terminal")
    assert judgement.kind is Kind.CANNOT_TELL
    assert "seems to want a terminal" in str(judgement.problem)


def test_an_interruption_that_never_comes_proves_nothing(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--seconds", "0", when=When(patterns=("step 99",)))
    assert judgement.kind is Kind.CANNOT_TELL
    assert "ended before the first interruption" in str(judgement.problem)


def test_sigterm_that_is_ignored_ends_in_sigkill(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--fault", "ignores-term", scenario=Scenario.PREEMPT, grace_seconds=0.1)
    assert "0.1 s after SIGTERM" in " ".join(judgement.notes)


def test_output_without_end_is_bounded(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--fault", "chatty", "--steps", "20", "--seconds", "0.02")
    assert judgement.kind is Kind.SAME, judgement
    logs = list((tmp_path / "logs").iterdir())
    assert max(log.stat().st_size for log in logs) < 9 << 20
    assert "were not kept" in (tmp_path / "logs" / "001-twin.log").read_text()


def test_nothing_is_left_running(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "--fault", "daemon", when=When(patterns=("step 5$",)))
    assert "left behind" in " ".join(judgement.notes)
    mark = str(tmp_path).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid():
            assert mark not in environ_of(entry)


def test_a_drill_that_is_told_to_end_ends_what_it_started(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    sleeps = f"import pathlib, signal; pathlib.Path({str(ready)!r}).touch(); signal.pause()"
    told = subprocess.Popen(
        [sys.executable, "-m", "samerun.cli", "drill", "--json", "--", sys.executable, "-c", sleeps, "{out}"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ready.exists()
    told.send_signal(signal.SIGTERM)
    assert told.wait(60) == 128 + signal.SIGTERM
    mark = f"TMPDIR={tmp_path}".encode()
    assert [entry for entry in Path("/proc").glob("[0-9]*") if mark in environ_of(entry).split(b"\0")] == []
    assert not list(tmp_path.glob("samerun-drill-*")), "its folder is left behind"


def environ_of(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""


def test_files_outside_the_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    judgement = drilled(tmp_path / "place", "--fault", "outside", when=When(patterns=("step 5$",)))
    assert "stray.json" in " ".join(judgement.notes)


def test_file_events_and_times_interrupt_too(tmp_path: Path) -> None:
    judgement = drilled(tmp_path / "watch", when=When(watch=tmp_path / "watch" / "out", seed=3), log=False)
    assert judgement.kind in (Kind.SAME, Kind.LOST_WORK), judgement
    judgement = drilled(tmp_path / "time", when=When(at_seconds=(0.4,)), log=False)
    assert judgement.kind in (Kind.SAME, Kind.LOST_WORK), judgement


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scenario": Scenario.TOPOLOGY}, "topology needs {nproc} in it"),
        ({"wish": Wish(points=("window:3",))}, "no point in it"),
        ({"leave_out": ("rng",)}, "nothing can be left out"),
        ({"command": Command(words=[sys.executable, "-c", "pass"])}, "say where it writes"),
        ({"command": Command(words=["/no/such/program", "{out}"])}, "cannot be started"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_a_usage_error(tmp_path: Path, change: Any, said: str) -> None:
    order: dict[str, Any] = {
        "scenario": Scenario.CONTINUITY,
        "command": Command(words=[sys.executable, "-c", "pass", "{out}"]),
        "wish": Wish(),
        "when": When(),
    }
    with pytest.raises(UsageError, match=said):
        drill(Order(**(order | change)), tmp_path, lambda name, done: None)


def test_a_folder_of_the_users_must_be_empty_and_is_left_empty(tmp_path: Path) -> None:
    folder, place = tmp_path / "mine", tmp_path / "place"
    folder.mkdir()
    place.mkdir()
    (folder / "precious").write_text("x")
    command = Command(words=[sys.executable, TRAINER, str(folder)], folder=folder, timeout_seconds=60)
    order = Order(
        scenario=Scenario.CONTINUITY, command=command, wish=Wish(), when=When(patterns=("step 5$",)), log=None
    )
    with pytest.raises(UsageError, match="not empty"):
        drill(order, place, lambda name, done: None)
    assert (folder / "precious").read_text() == "x"
    (folder / "precious").unlink()
    assert drill(order, place, lambda name, done: None).judgement.kind is Kind.SAME
    assert list(folder.iterdir()) == []
