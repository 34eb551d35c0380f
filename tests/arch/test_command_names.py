"""Commands and options are a promise: scripts rely on them, so a change is made here too, on purpose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

import samerun.cli.plan as plan
from samerun.cli.main import COMMANDS, build_app

FROZEN = Path(__file__).with_name("command_names.txt")


def options_in(help_text: str) -> set[str]:
    """Long options of an argparse help page, where they stand at the head of a line or in the usage."""
    return set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", help_text.split("example")[0]))


def surface(capsys: pytest.CaptureFixture[str]) -> set[str]:
    found = set()
    for name in COMMANDS:
        if name == "plan":
            continue
        top = typer.main.get_command(build_app(name)).commands[name]  # type: ignore[attr-defined]
        for path, command in _leaves(name, top):
            options = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
            found.add(" ".join([path, *sorted(options - {"--help"})]))
    for name in plan.COMMANDS:
        with pytest.raises(SystemExit):
            plan.main([name, "--help"])
        usage = capsys.readouterr().out.split("\n\n")[0]
        found.add(" ".join([f"plan {name}", *sorted(options_in(usage))]))
    return found


def _leaves(path: str, command: typer.core.TyperCommand | typer.core.TyperGroup) -> list[tuple[str, object]]:
    if isinstance(command, typer.core.TyperGroup):
        return [leaf for name, child in command.commands.items() for leaf in _leaves(f"{path} {name}", child)]
    return [(path, command)]


def test_commands_and_options_are_the_frozen_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(surface(capsys)) == FROZEN.read_text().splitlines()


def test_a_new_option_would_be_noticed() -> None:
    assert options_in("usage: samerun plan cost [--json] [--gpus GPUS]") == {"--json", "--gpus"}


def test_every_command_takes_json_or_runs_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    without = {line.split(" --")[0] for line in surface(capsys) if "--json" not in line.split()}
    assert without == {"launch"}  # its standard output belongs to the script
