"""`samerun drill`: a user's own training command, interrupted on purpose, and its twin."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from samerun.core.component import COMPONENTS
from samerun.errors import UsageError

if TYPE_CHECKING:
    from samerun.drill.inside.playing import OnProgress
    from samerun.drill.judgement import Told

_SCENARIOS: Final = ("continuity", "crash", "preempt", "topology", "damage", "faults")
_SECONDS: Final = re.compile(r"(\d+(?:\.\d+)?)s")


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun drill -- python train.py --out {out}")(drill)


def drill(
    words: Annotated[list[str], typer.Argument(metavar="[SCENARIO] -- COMMAND …", help=" ".join(_SCENARIOS))],
    at: Annotated[list[str] | None, typer.Option(help="window:13, save:writing, save:op:4@20; or 2.5s.")] = None,
    on: Annotated[list[str] | None, typer.Option(help="Interrupt at a printed line that matches.")] = None,
    watch: Annotated[Path | None, typer.Option(help="Interrupt at changes of files under this folder.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Interruptions, unless the scenario sets them.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the points that you do not name.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help="Where --at points are.")] = 0,
    nproc: Annotated[str, typer.Option(help="What {nproc} in the command becomes, start by start.")] = "1",
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the command writes, if not to {out}.")] = None,
    log: Annotated[Path | None, typer.Option(help="Its log with a row per step (JSONL, CSV), in that folder.")] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option("--break", help="Leave this component out of every resume: exit must be 3.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Across numbers of ranks.")] = 1e-4,
    timeout: Annotated[float, typer.Option(help="Seconds that one start may take.")] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to SIGKILL.")] = 10.0,
    keep: Annotated[Path | None, typer.Option(help="Keep everything in this new folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Run COMMAND without interruption (the twin), then interrupt it, start it again until it is done, and compare.

    In COMMAND, {out} becomes an empty folder, {nproc} a number of ranks, and {resume:WORD} is there only when it is
    started again. Verdicts: same, drift, wrong, lost work, crashed, hung, cannot tell.

    Exit codes: 0 the same run, 3 any other verdict, 2 it cannot be done like this.
    """
    from samerun.drill.drilling import Order, drill
    from samerun.drill.inside.scenarios import Scenario, Wish
    from samerun.drill.outside.triggers import When
    from samerun.drill.processes import leaving_in_order
    from samerun.drill.starting import Command

    for name in leave_out or ():
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
            raise UsageError(f"--break {name!r} is no name of a component: {', '.join(COMPONENTS)}, or one of your own")
    scenario, command = _split(words)
    seconds = tuple(float(match.group(1)) for point in at or () if (match := _SECONDS.fullmatch(point)))
    points = tuple(point for point in at or () if not _SECONDS.fullmatch(point))
    sizes = _sizes(nproc)
    with leaving_in_order(), _workplace(keep) as place:
        order = Order(
            scenario=Scenario(scenario),
            command=Command(
                words=command,
                folder=folder.resolve() if folder else None,
                timeout_seconds=timeout,
                grace_seconds=grace,
                nproc=sizes[0],
            ),
            wish=Wish(points=points, num_kills=kills, seed=seed, rank=rank, sizes=sizes),
            when=When(
                at_seconds=seconds,
                patterns=tuple(on or ()),
                watch=_inside_out(watch, place, folder),
                num_kills=kills,
                seed=seed,
            ),
            log=_relative(log, folder),
            leave_out=tuple(leave_out or ()),
            tolerance=tolerance,
        )
        with _progress(quiet=as_json) as on_progress:
            told = drill(order, place, on_progress)
    if as_json:
        sys.stdout.write(json.dumps(told.to_json(), indent=1) + "\n")
    else:
        _print(told, keep)
    raise typer.Exit(int(told.judgement.exit_code))


def _split(words: list[str]) -> tuple[str, list[str]]:
    if words[0] in _SCENARIOS:
        return words[0], words[1:]
    return _SCENARIOS[0], words


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--nproc {text!r}: numbers of ranks, such as 2 or 4,2,1")
    return sizes


def _inside_out(watch: Path | None, place: Path, folder: Path | None) -> Path | None:
    """`--watch {out}/checkpoints` in the words of the drill's own folder."""
    if watch is None:
        return None
    out = folder.resolve() if folder else place / "out"
    return Path(str(watch).replace("{out}", str(out)))


def _relative(log: Path | None, folder: Path | None) -> Path | None:
    if log is None:
        return None
    text = str(log).removeprefix("{out}/")
    if folder is not None and log.is_absolute() and log.is_relative_to(folder.resolve()):
        return log.relative_to(folder.resolve())
    if Path(text).is_absolute():
        raise UsageError(f"--log {log}: must lie in the folder that the command writes to; say {{out}}/steps.jsonl")
    return Path(text)


@contextlib.contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise UsageError(f"--keep {keep} is not empty; name a new folder")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    made = Path(tempfile.mkdtemp(prefix="samerun-drill-"))
    try:
        yield made.resolve()
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[OnProgress]:
    if quiet:
        yield lambda name, done: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("starting")

        def show(name: str, done: int) -> None:
            bars.update(task, description=f"{name}, update {done}" if done else name)

        yield show


def _print(told: Told, keep: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    judgement, console = told.judgement, Console()
    for heading, lines in (("What happened", told.interruptions), ("Notes", judgement.notes)):
        if lines:
            console.print(f"\n{heading}")
            for line in lines:
                console.print(f"  • {line}", highlight=False, markup=False)
    if judgement.diagnoses:
        console.print("\nWhat was named")
        for one in judgement.diagnoses:
            mark = "named    " if one["named"] else "NOT NAMED"
            console.print(f"  • {mark} {one['fault']}: {one['said']}", highlight=False, markup=False)
    if judgement.components:
        table = Table()
        for title in ("component", "verdict", "first difference"):
            table.add_column(title)
        for name, first in judgement.components.items():
            where = ""
            if first is not None:
                update = f"update {first.update}" if first.update >= 0 else "at the end"
                where = f"{update}, {first.key}" + ("" if first.size is None else f", by {first.size:.3g}")
            table.add_row(name, "[green]same[/]" if first is None else "[red]differs[/]", where)
        console.print(table)
    if judgement.problem is not None:
        console.print(judgement.problem, highlight=False, markup=False)
    console.print(f"Verdict: {_verdict(told)} ({len(told.starts)} starts, {told.seconds:.0f} s).", highlight=False)
    if keep is not None:
        console.print(f"Everything is in {keep}: starts.sh repeats the starts, drill.json says what came of them.")


def _verdict(told: Told) -> str:
    judgement = told.judgement
    text = judgement.kind.value
    if judgement.lost_updates:
        text += f", {judgement.lost_updates} updates done again"
    if judgement.cause:
        text += f"; not restored: {', '.join(judgement.cause)}"
    if judgement.suspected:
        text += f"; no file it saved holds: {', '.join(judgement.suspected)}"
    return text
