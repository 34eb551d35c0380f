"""The entry point. Commands are named here and imported only when called, so `samerun plan` never pays for torch.

Those in `WITHOUT_TYPER` also have a `main(arguments)`, which parses by itself: importing typer takes longer than
a plan.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Final

from samerun.errors import ExitCode, SamerunError, Stop

if TYPE_CHECKING:
    import typer

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "ls": ("samerun.cli.checkpoints.ls", "The checkpoints of a run, newest first."),
    "show": ("samerun.cli.checkpoints.show", "What one checkpoint holds."),
    "why": ("samerun.cli.checkpoints.why", "Which checkpoint a start would take, and why not the others."),
    "verify": ("samerun.cli.checkpoints.verify", "Every byte of a run's checkpoints against its digest."),
    "diff": ("samerun.cli.checkpoints.diff", "What two checkpoints hold differently, in ulps."),
    "tag": ("samerun.cli.checkpoints.tag", "A name for a checkpoint, which keeps it."),
    "prune": ("samerun.cli.checkpoints.prune", "Remove checkpoints that nothing keeps."),
    "report": ("samerun.cli.report", "One HTML file about a run."),
    "export": ("samerun.cli.export", "The weights of a checkpoint as safetensors, or a file of torch.save."),
    "import": ("samerun.cli.import_", "A foreign checkpoint, read without its code, for new runs to begin from."),
    "demo": ("samerun.cli.demo", "A real training, killed five ways, resumed each time, compared with its twin."),
    "drill": ("samerun.cli.drill", "Your own command, interrupted on purpose, resumed, compared with its twin."),
    "launch": ("samerun.cli.launch", "Run a script on several ranks, with exit codes that mean something."),
    "canary": ("samerun.cli.canary", "Check the hardware: the same arithmetic, again and again."),
    "doctor": ("samerun.cli.doctor", "What this machine offers, and what a storage path really guarantees."),
    "plan": (
        "samerun.cli.plan",
        "Arithmetic before launch: memory, interval, goodput, batch, preempt, cost, …",
    ),
}
"""Command → (module, one line of help).

The module holds `app`, a typer application for a command with parts (`plan memory`), or `register(app, name, summary)`,
which adds a command without parts.
"""

WITHOUT_TYPER: Final = frozenset({"plan"})
"""Commands whose module has `main(arguments)` for a quick start, beside `app`."""

_INTERRUPTED: Final = 130


def build_app(wanted: str | None) -> typer.Typer:
    """The application with the wanted command loaded and every other one as a line of help."""
    import typer  # not at the top: the quick commands never need it

    app = typer.Typer(
        name="samerun",
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="A PyTorch training run that stops comes back as the same run, and you can prove it.",
        epilog="Example: samerun demo",
        pretty_exceptions_enable=False,
    )

    version_option: bool = typer.Option(False, "--version", help="Print the version and exit.")

    @app.callback(invoke_without_command=True)
    def root(show_version: bool = version_option) -> None:
        if show_version:
            from importlib.metadata import version

            typer.echo(f"samerun {version('samerun')}")
            raise typer.Exit

    for name, (module, summary) in COMMANDS.items():
        if name == wanted:
            _add(app, importlib.import_module(module), name, summary)
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


def _add(app: typer.Typer, module: ModuleType, name: str, summary: str) -> None:
    if hasattr(module, "register"):
        module.register(app, name, summary)
    else:
        app.add_typer(module.app, name=name, help=summary)


def _not_loaded() -> None:
    raise AssertionError("a command that was not asked for cannot run")


def main() -> None:
    """Runs one command; the exit code is the one that DESIGN promises for what happened."""
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    try:
        if sys.argv[1:2] == [wanted] and wanted in WITHOUT_TYPER:
            importlib.import_module(COMMANDS[wanted][0]).main(sys.argv[2:])
        else:
            build_app(wanted)()
    except BrokenPipeError:  # `samerun … | head`: the reader has what it wanted; a traceback would be noise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(ExitCode.FAILED))
    except KeyboardInterrupt:
        sys.stderr.write("samerun: stopped by Ctrl-C\n")
        sys.exit(_INTERRUPTED)
    except Stop as stop:
        sys.stderr.write(f"samerun: {stop.reason}\n")
        sys.exit(int(stop.exit_code))
    except SamerunError as error:
        sys.stderr.write(f"samerun: {error}\n")
        sys.exit(int(error.exit_code))
