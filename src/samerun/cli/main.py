"""The entry point. Commands are named here and imported only when called, so `samerun plan` never pays for torch."""

from __future__ import annotations

import importlib
import sys
from typing import Final

import click
import typer

from samerun.errors import ExitCode, SamerunError, Stop

_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "plan": ("samerun.cli.plan", "arithmetic before launch: memory, interval, goodput, batch, preempt, cost, …"),
}
"""Command name → (module that holds `app`, a typer application; one line of help)."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        return typer.main.get_command(importlib.import_module(module).app)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A PyTorch training run that stops comes back as the same run, and you can prove it.",
    epilog="Example: samerun demo",
)
@click.version_option(package_name="samerun")
def _root() -> None:
    pass


def main() -> None:
    """Runs one command; the exit code is the one that DESIGN promises for what happened."""
    try:
        code = _root.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.stderr.write("samerun: stopped by Ctrl-C\n")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("samerun: stopped by Ctrl-C\n")
        sys.exit(130)
    except Stop as stop:
        sys.stderr.write(f"samerun: {stop.reason}\n")
        sys.exit(int(stop.exit_code))
    except SamerunError as error:
        sys.stderr.write(f"samerun: {error}\n")
        sys.exit(int(error.exit_code))
    sys.exit(code if isinstance(code, int) else int(ExitCode.DONE))
