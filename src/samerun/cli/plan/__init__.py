"""`samerun plan …`: arithmetic before launch. Each command parses, calls one pure function of samerun.plan, prints.

`main` is the fast way in; `app` is the same for whoever composes typer applications.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from samerun.errors import UsageError

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "memory": ("memory", "peak memory of one rank, bounded, term by term: does it fit?"),
    "layouts": ("layouts", "every layout (D, TP, PP, micro, K) that a device size and a batch allow"),
    "interval": ("availability", "how often to save, from save time and interruption rate"),
    "goodput": ("availability", "how much of the wall clock is kept work"),
    "preempt": ("availability", "does a save fit into the warning before a kill?"),
    "batch": ("batch", "batch and mesh arithmetic, solved for the one unknown; losing ranks"),
    "schedule": ("batch", "warm-up and decay in updates, samples, tokens; remap to another batch"),
    "scaling": ("hypotheses", "learning-rate rules for another batch, as hypotheses to test"),
    "noise": ("hypotheses", "gradient noise scale from measured gradient norms"),
    "cost": ("cost", "FLOPs, days and money of a run"),
    "recipe": ("cost", "do objective, trainable weights, precision and method go together?"),
}
"""Command → (module of this folder, one line of help). The module holds a function of the command's name."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs one command of `samerun plan` and ends with its exit code; UsageError for what cannot be asked."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        raise SystemExit(0 if words else 2)
    name, *rest = words
    if name not in COMMANDS:
        close = _closest(name)
        hint = f"did you mean '{close}'? " if close else ""
        raise UsageError(f"samerun plan has no command {name!r}; {hint}it has: {', '.join(COMMANDS)}")
    command = getattr(importlib.import_module(f"samerun.cli.plan.{COMMANDS[name][0]}"), name)
    raise SystemExit(int(command(rest)))


def _closest(name: str) -> str | None:
    difflib = importlib.import_module("difflib")
    found = difflib.get_close_matches(name, list(COMMANDS), n=1)
    return found[0] if found else None


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name.ljust(width)}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([
        "usage: samerun plan COMMAND [options]",
        "",
        "Arithmetic before launch: reject what cannot work while it costs nothing.",
        "",
        *lines,
        "",
        "Each takes --json and --help. Exit code 3: the plan cannot work; 0: it can, or nobody can tell.",
        "example: samerun plan memory --params 70e9 --method qlora --device 24GiB",
        "",
    ])  # fmt: skip


def _typer_app() -> Any:
    """One pass-through command each, so that `samerun.cli.plan.app` composes like every other command's."""
    typer = importlib.import_module("typer")
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Arithmetic before launch.")
    for name, (_, summary) in COMMANDS.items():
        app.command(
            name,
            help=summary,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_pass_through(typer.Context, name))
    return app


def _pass_through(context_type: Any, name: str) -> Any:
    def command(context: Any) -> None:
        main([name, *context.args])

    command.__annotations__["context"] = context_type
    return command


def __getattr__(name: str) -> Any:
    if name == "app":
        return _typer_app()
    raise AttributeError(f"module 'samerun.cli.plan' has no attribute {name!r}")
