"""`samerun prune`: thinning out, by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from samerun.checkpoint.attempts import newest_attempt
from samerun.checkpoint.lookup import open_run
from samerun.checkpoint.prune import Pruning, plan_pruning, prune
from samerun.checkpoint.retention import Every, Last, Policy
from samerun.checkpoint.verify import newest_sound
from samerun.cli.checkpoints.target import answer, catalog_of
from samerun.storage.api import Storage


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(
        name, short_help=summary, epilog="Example: samerun prune runs/policy-sft --keep-last 3 --keep-every 1000"
    )(prune_command)


def prune_command(
    run: Annotated[str, typer.Argument(help="The run's path.")],
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Keep the newest so many.")] = 5,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="Also keep one of each so many updates.")
    ] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also remove saves that never finished. The run must be stopped.")
    ] = False,
    retired: Annotated[
        bool, typer.Option("--retired", help="Also remove all that a rewind has retired; tagged ones stay.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Remove checkpoints of RUN that no option keeps. Tagged ones stay, and so does the newest that is sound.

    Before anything goes, the newest checkpoints are read whole until one is proven sound; if none is, nothing goes.
    """
    storage = open_run(run)
    policies: list[Policy] = [Last(keep_last)]
    if keep_every is not None:
        policies.append(Every(keep_every))
    proven = newest_sound(storage, catalog_of(storage))
    pruning = plan_pruning(
        storage,
        policies,
        epoch=newest_attempt(storage),
        proven={proven},
        unfinished=unfinished,
        keep_retired=not retired,
    )
    if not dry_run:
        prune(storage, pruning)
    answer(_document(storage, pruning, dry_run), _lines(pruning, dry_run), as_json=as_json)


def _document(storage: Storage, pruning: Pruning, dry_run: bool) -> dict[str, object]:
    return {
        "schema": "samerun.prune.v1",
        "run": storage.where,
        "dry_run": dry_run,
        "removed": list(pruning.removed),
        "unfinished": list(pruning.unfinished),
        "kept": list(pruning.kept),
        "retired": list(pruning.retired),
    }


def _lines(pruning: Pruning, dry_run: bool) -> list[str]:
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {name}" for name in (*pruning.removed, *pruning.unfinished)]
    lines.append(f"kept {len(pruning.kept)}: {' '.join(pruning.kept)}")
    if pruning.retired:
        lines.append(f"kept {len(pruning.retired)} retired: {' '.join(pruning.retired)}")
    return lines
