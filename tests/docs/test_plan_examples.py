"""The examples of docs/plan.md, run: each command must print what the page shows."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from plan_named_decoder import make_run
from samerun.cli.plan import COMMANDS, main

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def examples() -> list[list[tuple[str, str]]]:
    """(command, what is shown below it) for each block, in order."""
    found = []
    for block in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        steps = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        found.append([(step.partition("\n")[0], step.partition("\n")[2]) for step in steps])
    return found


def play(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    program, plan, *arguments = shlex.split(command)
    assert (program, plan) == ("samerun", "plan")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    return shown.out + shown.err, int(str(ended.value.code))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run: it holds the run `runs/tiny` that one of them names."""
    path = tmp_path_factory.mktemp("examples")
    make_run(path / "runs" / "tiny")
    return path


def without_random_names(shown: str) -> str:
    """A checkpoint's name ends in eight random digits."""
    return re.sub(r"(u\d{9}-)[0-9a-f]{8}", r"\g<1>1f3a9c2e", shown)


@pytest.mark.parametrize("block", examples(), ids=lambda block: block[0][0][:60])
def test_example(
    block: list[tuple[str, str]], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    code = 0
    for command, expected in block:
        if command == "echo $?":
            assert expected.strip() == str(code)
        else:
            shown, code = play(command, capsys)
            assert without_random_names(shown) == expected


def test_every_command_has_an_example() -> None:
    shown = {command.split()[2] for block in examples() for command, _ in block if command != "echo $?"}
    assert shown == set(COMMANDS)


def test_python_examples() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted >= 4
    assert result.failed == 0
