"""`samerun why`: which checkpoint a start would take, and why not the others."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from samerun.checkpoint.catalog import read_pointer
from samerun.checkpoint.lookup import open_run
from samerun.checkpoint.verify import verify_checkpoint
from samerun.cli.checkpoints.target import answer, catalog_of
from samerun.errors import ExitCode
from samerun.format import names
from samerun.health.rollback.story import stories


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun why runs/policy-sft")(why)


def why(
    run: Annotated[str, typer.Argument(help="The run's path.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Say which checkpoint the next start of RUN would take, reading all its bytes, and why not each of the others.

    Then what the run has decided about itself: what was seen, what was done, what came of it.
    Newest is by attempt and windows, never by name or time. Whether it fits a program, only that program can tell.
    Exit code 3 when there is none to take.
    """
    storage = open_run(run)
    catalog = catalog_of(storage)
    decisions: list[dict[str, Any]] = []
    taken: str | None = None
    for entry in catalog.entries:
        said = f"attempt {entry.epoch}, window {entry.progress.windows.value}"
        if taken is not None:
            decisions.append({"name": entry.name, "decision": "older", "reason": f"{said}; it is older than {taken}"})
            continue
        problems = verify_checkpoint(storage, entry.name).problems
        if problems:
            decisions.append({"name": entry.name, "decision": "damaged", "reason": problems[0]})
        else:
            taken = entry.name
            decisions.append({"name": entry.name, "decision": "taken", "reason": f"{said}: newest and sound"})
    decisions += [
        {
            "name": one.entry.name,
            "decision": "retired",
            "reason": f"{one.by.reason} (attempt {one.by.written_by})",
        }
        for one in catalog.retired
    ]
    decisions += [{"name": r.name, "decision": "incomplete", "reason": r.reason} for r in catalog.rejected]
    pointer = read_pointer(storage, names.LATEST_FILE)
    recorded = stories(storage)
    document = {
        "schema": "samerun.why.v1",
        "run": storage.where,
        "verdict": "resume" if taken else ("fresh" if not decisions else "none usable"),
        "taken": taken,
        "latest": pointer.name if pointer else None,
        "decisions": decisions,
        "recorded": [story.to_json() for story in recorded],
    }
    lines = [f"{d['decision']:<10} {d['name']}  {d['reason']}" for d in decisions] or ["nothing was ever saved here"]
    if pointer is not None and taken is not None and pointer.name != taken:
        lines.append(f"latest.json names {pointer.name}; it is only a hint and was not followed")
    lines += [line for story in recorded for line in story.lines()]
    answer(document, lines, as_json=as_json)
    if decisions and taken is None:
        raise typer.Exit(int(ExitCode.NEGATIVE))
