"""The entry point. Commands are named here and imported only when called, so `samerun plan` never pays for torch."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from typing import Annotated, Final

import typer

from samerun.errors import SamerunError, Stop

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "plan": (
        "samerun.cli.plan",
        "Arithmetic before launch: memory, interval, goodput, batch, preempt, cost, …",
    ),
}
"""Command → (module, one line of help). The module holds `app`, a typer application with one or several commands."""

_INTERRUPTED: Final = 130


def build_app(wanted: str | None) -> typer.Typer:
    """The application with the wanted command loaded and every other one as a line of help."""
    app = typer.Typer(
        name="samerun",
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="A PyTorch training run that stops comes back as the same run, and you can prove it.",
        epilog="Example: samerun demo",
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        show_version: Annotated[
            bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        if show_version:
            typer.echo(f"samerun {version('samerun')}")
            raise typer.Exit

    for name, (module, summary) in COMMANDS.items():
        if name == wanted:
            app.add_typer(importlib.import_module(module).app, name=name, help=summary)
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("a command that was not asked for cannot run")


def main() -> None:
    """Runs one command; the exit code is the one that DESIGN promises for what happened."""
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    try:
        build_app(wanted)()
    except KeyboardInterrupt:
        sys.stderr.write("samerun: stopped by Ctrl-C\n")
        sys.exit(_INTERRUPTED)
    except Stop as stop:
        sys.stderr.write(f"samerun: {stop.reason}\n")
        sys.exit(int(stop.exit_code))
    except SamerunError as error:
        sys.stderr.write(f"samerun: {error}\n")
        sys.exit(int(error.exit_code))
