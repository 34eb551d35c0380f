"""`samerun launch`: a script on several ranks, with exit codes that mean something."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from samerun.errors import ExitCode


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(
        name,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
        short_help=summary,
        epilog="Example: samerun launch --nproc 2 train.py --lr 3e-4",
    )(launch)


def launch(
    context: typer.Context,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks on this machine.")] = 1,
) -> None:
    """Run SCRIPT under torchrun. Other options before SCRIPT are torchrun's own.

    Exit codes: 0 done, 75 stopped and saved (start me again), 93 do not start me again, 4 refused, 1 failed.
    """
    from samerun.launch.torchrun import launch as run_torchrun

    if not context.args:
        raise typer.BadParameter("which script? Example: samerun launch --nproc 2 train.py")
    code, reason = run_torchrun(context.args, num_ranks=nproc)
    if code is not ExitCode.DONE:
        sys.stderr.write(f"samerun launch: {reason}\n")
    raise typer.Exit(int(code))
