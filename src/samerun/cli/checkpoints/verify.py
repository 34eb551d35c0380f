"""`samerun verify`: every byte against its digest."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from samerun.checkpoint.lookup import find, open_run
from samerun.checkpoint.verify import verify_checkpoint
from samerun.cli.checkpoints.target import answer, catalog_of, split_target
from samerun.core.units import format_bytes
from samerun.errors import ExitCode
from samerun.format import names


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun verify runs/policy-sft")(verify)


def verify(
    target: Annotated[str, typer.Argument(help="RUN for all its checkpoints, or RUN@NAME for one.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Read every file of every checkpoint of RUN and compare it with its digests. Exit code 3 when anything differs.

    A save that never finished (no manifest) is told, but is no damage: nothing would ever load it.
    """
    path, name = split_target(target)
    storage = open_run(path)
    catalog = catalog_of(storage)
    chosen = [find(storage, catalog, name).name] if name else [entry.name for entry in catalog.entries]
    retired = {one.entry.name for one in catalog.retired}
    chosen += sorted(retired) if not name else []
    unfinished = []
    for rejected in catalog.rejected if not name else ():
        if not names.is_checkpoint_name(rejected.name):
            continue
        if names.MANIFEST in storage.names(names.checkpoint_prefix(rejected.name)):
            chosen.append(rejected.name)
        else:
            unfinished.append(rejected.name)
    lines: list[str] = []
    results: list[dict[str, Any]] = []
    for checkpoint in chosen:
        found = verify_checkpoint(storage, checkpoint)
        results.append(
            {"name": checkpoint, "files": found.num_files, "bytes": found.num_bytes, "problems": list(found.problems)}
        )
        sound = f"sound, {found.num_files} files, {format_bytes(found.num_bytes)}"
        aside = " (retired)" if checkpoint in retired else ""
        lines.append(f"{checkpoint}  {sound if not found.problems else 'DAMAGED'}{aside}")
        lines += [f"    {problem}" for problem in found.problems]
    lines += [f"{left}  unfinished, never loaded" for left in unfinished]
    damaged = any(result["problems"] for result in results)
    document = {
        "schema": "samerun.verify.v1",
        "run": storage.where,
        "verdict": "damaged" if damaged else "sound",
        "checkpoints": results,
        "unfinished": unfinished,
    }
    answer(document, lines or ["no checkpoints"], as_json=as_json)
    if damaged:
        raise typer.Exit(int(ExitCode.NEGATIVE))
