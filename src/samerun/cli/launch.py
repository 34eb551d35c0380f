"""`samerun launch`: a script on several ranks, with exit codes that mean something."""

from __future__ import annotations

import signal
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
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of one failure without committed progress in between; then exit 93.")
    ] = 0,
) -> None:
    """Run SCRIPT under torchrun. Other options before SCRIPT are torchrun's own (--nnodes, --shutdown-timeout, …).

    A run that fails is started again while it makes progress or --max-restarts allows; the ledger lies with the run, in
    journal/launch.jsonl. Exit codes: 0 done, 75 stopped and saved (start me again), 93 do not start me again, 4
    refused, 1 failed.
    """
    # A warning before torchrun watches for it, or after it has ended, must not kill what starts or was saved.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from samerun.launch.again import launch_until_done
    from samerun.launch.ledger import Limits

    if not context.args:
        raise typer.BadParameter("which script? Example: samerun launch --nproc 2 train.py")
    ended = launch_until_done(context.args, num_ranks=nproc, limits=Limits.of(max_restarts), say=_say)
    if ended.code is not ExitCode.DONE:
        _say(ended.reason if ended.rank is None else f"rank {ended.rank}: {ended.reason}")
    raise typer.Exit(int(ended.code))


def _say(line: str) -> None:
    sys.stderr.write(f"samerun launch: {line}\n")
