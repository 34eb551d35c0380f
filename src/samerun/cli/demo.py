"""`samerun demo`: a real training on real text, interrupted several ways, and its twin."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from samerun.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from samerun.demo.telling import Told
    from samerun.drill.inside.playing import OnProgress

_BREAKABLE: Final = ("moments", "steps", "cursor", "rng", "scheduler")


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun demo --break moments")(demo)


def demo(
    leave_out: Annotated[
        str | None,
        typer.Option(
            "--break", help=f"Leave this out on every resume; must end in exit 3. One of {', '.join(_BREAKABLE)}."
        ),
    ] = None,
    updates: Annotated[int, typer.Option(help="Length of the run.")] = 40,
    folder: Annotated[Path | None, typer.Option("--dir", help="Work here and keep everything.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Train a small GPT on the text of Python's standard library with two ranks: once without interruption (the twin),
    once through SIGKILL, SIGTERM, a kill inside a save and a damaged checkpoint. Compare them bit by bit.

    Exit codes: 0 every component is the same, 3 something differs, 1 the demo itself failed.
    """
    from samerun.demo.story import SHORTEST_RUN_UPDATES
    from samerun.demo.telling import tell
    from samerun.drill.processes import leaving_in_order

    if leave_out is not None and leave_out not in _BREAKABLE:
        raise UsageError(f"--break {leave_out}: choose one of {', '.join(_BREAKABLE)}")
    if updates < SHORTEST_RUN_UPDATES:
        raise UsageError(f"--updates {updates}: the interruptions need at least {SHORTEST_RUN_UPDATES}")
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--dir {folder} is not empty; name a new folder")
    with leaving_in_order(), _workplace(folder) as place, _progress(updates, quiet=as_json) as on_progress:
        told = tell(place, num_updates=updates, leave_out=[leave_out] if leave_out else [], on_progress=on_progress)
    if as_json:
        sys.stdout.write(json.dumps(told.to_json(), indent=1) + "\n")
    else:
        _print(told)
    if told.verdict.problem is not None:
        raise typer.Exit(int(ExitCode.FAILED))
    raise typer.Exit(int(ExitCode.DONE if told.verdict.same else ExitCode.NEGATIVE))


@contextlib.contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
        return
    made = Path(tempfile.mkdtemp(prefix="samerun-demo-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _progress(updates: int, *, quiet: bool) -> Iterator[OnProgress]:
    if quiet:
        yield lambda name, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        titles = {"twin": "twin, uninterrupted", "run": "the interrupted run"}
        tasks = {name: bars.add_task(title, total=updates, start=name == "twin") for name, title in titles.items()}
        started = {"twin"}

        def show(name: str, done: int) -> None:
            if name not in started:
                started.add(name)
                bars.start_task(tasks[name])
                bars.update(tasks["twin"], completed=updates)
            bars.update(tasks[name], completed=done)

        yield show


def _print(told: Told) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("\nWhat happened")
    for line in told.interruptions:
        console.print(f"  [yellow]•[/] {line}", highlight=False)
    console.print("\nWhat each start decided, and why")
    for start in told.starts:
        source = f" from {start['checkpoint']} (update {start['progress']['updates']})" if start["checkpoint"] else ""
        console.print(f"  attempt {start['attempt']}: {start['kind']}{source}", highlight=False)
        for reason in start["passed"]:
            console.print(f"      not taken: {reason}", highlight=False)
        if start["waived"]:
            console.print(f"      [red]not restored, on purpose: {', '.join(start['waived'])}[/]", highlight=False)
    console.print("\nThe interrupted run beside its twin, at every edge of every attempt")
    table = Table()
    for heading in ("component", "verdict", "first difference"):
        table.add_column(heading)
    for name, first in told.verdict.components.items():
        where = ""
        if first is not None:
            size = "" if first.size is None else f", by {first.size:.3g}"
            where = f"update {first.update}, rank {first.rank}, {first.key}{size}"
        table.add_row(name, "[green]same[/]" if first is None else "[red]differs[/]", where)
    console.print(table)
    if told.verdict.problem is not None:
        console.print(f"[red]The demo could not be finished:[/] {told.verdict.problem}", highlight=False)
    elif told.verdict.same:
        console.print(f"[green]The same run[/], bit for bit, after {len(told.starts)} starts ({told.seconds:.0f} s).")
    else:
        cause = ", ".join(told.verdict.cause) or "nothing differed right after a restore"
        console.print(f"[red]Not the same run.[/] Cause: {cause} ({told.seconds:.0f} s).")
