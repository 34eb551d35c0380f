"""The command: every end has its code, messages go to standard error, and quick commands load nothing heavy."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from samerun import __version__
from samerun.cli import main as cli
from samerun.errors import DamagedError, DoNotRestart, Refused, Stopped, StorageError, UsageError


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["samerun", *words])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command that ends as it is told."""

    def make(error: BaseException) -> None:
        module = ModuleType("failing_command")

        def register(app: Any, name: str, summary: str) -> None:
            def fail() -> None:
                raise error

            app.command(name)(fail)

        module.register = register  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "failing_command", module)
        monkeypatch.setitem(cli.COMMANDS, "fail", ("failing_command", "Fails."))

    return make


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("write it like this"), 2),
        (DamagedError("a block is damaged"), 3),
        (StorageError("the disk is full"), 1),
        (Stopped("saved"), 75),
        (Refused("another run"), 4),
        (DoNotRestart("newer attempt"), 93),
    ],
)
def test_errors_are_one_sentence_and_their_code(
    failing: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Any, code: int
) -> None:
    failing(error)
    assert run(monkeypatch, "fail") == code
    assert capsys.readouterr() == ("", f"samerun: {error}\n")


def test_ctrl_c_is_said_in_one_line(
    failing: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(KeyboardInterrupt())
    assert run(monkeypatch, "fail") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_our_own_mistakes_are_not_hidden(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, "fail")


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert "Example: samerun" in out


def test_the_version_is_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"samerun {__version__}\n"


@pytest.mark.parametrize("words", [["nonsense"], ["--nonsense"], ["launch"], ["demo", "--updates", "many"]])
def test_what_is_not_there_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_commands_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(monkeypatch, name, "--help") == 0
    assert "xample" in capsys.readouterr().out


def test_commands_without_typer_parse_by_themselves() -> None:
    for name in cli.WITHOUT_TYPER:
        assert callable(importlib.import_module(cli.COMMANDS[name][0]).main)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--break", "weights"], "--break weights: choose one of moments, steps, cursor, rng, scheduler"),
        (["--updates", "3"], "--updates 3: the interruptions need at least 30"),
    ],
)
def test_a_demo_that_cannot_be_told_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(monkeypatch, "demo", *words) == 2
    assert message in capsys.readouterr().err


def test_a_demo_never_writes_into_a_folder_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("keep")
    assert run(monkeypatch, "demo", "--dir", str(tmp_path)) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("words", [["plan", "--help"], ["--help"]])
def test_a_reader_that_has_left_is_no_traceback(words: list[str]) -> None:
    """As in `samerun … | head`: the reading end is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    end = subprocess.run(
        [sys.executable, "-m", "samerun.cli", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (end.returncode, end.stderr) == (1, "")
