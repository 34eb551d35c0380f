"""`samerun ls`: the checkpoints of a run, newest first."""

from __future__ import annotations

from typing import Annotated

import typer

from samerun.checkpoint.lookup import open_run
from samerun.checkpoint.prune import tags_by_name
from samerun.cli.checkpoints.target import answer, catalog_of, describe, describe_retirement
from samerun.core.units import format_bytes


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun ls runs/policy-sft")(ls)


def ls(
    run: Annotated[str, typer.Argument(help="The run's path.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """List the complete checkpoints of RUN, newest first; then those that a rewind has retired, and what is none."""
    storage = open_run(run)
    catalog, tagged = catalog_of(storage), tags_by_name(storage)
    rows = [["checkpoint", "attempt", "updates", "windows", "ranks", "size", "tags"]]
    rows += [
        [
            entry.name,
            str(entry.epoch),
            str(entry.progress.updates.value),
            str(entry.progress.windows.value),
            str(entry.world_size),
            format_bytes(entry.num_bytes),
            " ".join(tagged.get(entry.name, [])),
        ]
        for entry in catalog.entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"retired: {one.entry.name}: {one.by.reason}" for one in catalog.retired]
    lines += [f"not one: {rejected.name}: {rejected.reason}" for rejected in catalog.rejected]
    document = {
        "schema": "samerun.ls.v1",
        "run": storage.where,
        "checkpoints": [describe(entry, tagged.get(entry.name, [])) for entry in catalog.entries],
        "retired": [
            {**describe(one.entry, tagged.get(one.entry.name, [])), **describe_retirement(one.by)}
            for one in catalog.retired
        ],
        "rejected": [{"name": rejected.name, "reason": rejected.reason} for rejected in catalog.rejected],
    }
    answer(document, lines, as_json=as_json)
