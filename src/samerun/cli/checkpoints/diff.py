"""`samerun diff`: what two checkpoints hold differently, and how far tensors are apart."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from samerun.checkpoint.compare.diff import Difference, differences
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.lookup import find, open_run
from samerun.cli.checkpoints.target import answer, catalog_of, split_target
from samerun.errors import ExitCode


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun diff runs/a@best runs/b")(diff)


def diff(
    first: Annotated[str, typer.Argument(help="RUN or RUN@NAME.")],
    second: Annotated[str, typer.Argument(help="RUN or RUN@NAME; @NAME alone is of the first run.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Compare two checkpoints bit by bit, whatever numbers of ranks saved them. Exit code 3 when they differ.

    Distances are in units in the last place: the number of representable values from one to the other.
    """
    left = _open(first)
    right = _open(f"{split_target(first)[0]}{second}" if second.startswith("@") else second)
    with left, right:
        found = [*_progress(left, right), *differences(left, right)]
    document = {
        "schema": "samerun.diff.v1",
        "verdict": "differ" if found else "same",
        "first": left.entry.name,
        "second": right.entry.name,
        "differences": [_described(difference) for difference in found],
    }
    lines = [_line(difference) for difference in found] or ["same, bit for bit"]
    answer(document, lines, as_json=as_json)
    if found:
        raise typer.Exit(int(ExitCode.NEGATIVE))


def _open(target: str) -> Checkpoint:
    path, name = split_target(target)
    storage = open_run(path)
    entry = find(storage, catalog_of(storage), name)
    return Checkpoint(storage, entry, rank=0, size=entry.world_size)


def _progress(left: Checkpoint, right: Checkpoint) -> list[Difference]:
    ours, theirs = left.progress.to_json(), right.progress.to_json()
    return [
        Difference(where=f"progress.{unit}", what=f"{ours[unit]} against {theirs[unit]}")
        for unit in ours
        if ours[unit] != theirs[unit]
    ]


def _described(difference: Difference) -> dict[str, Any]:
    found: dict[str, Any] = {"where": difference.where, "what": difference.what}
    if difference.distance is not None:
        found |= {
            "elements": difference.distance.num_elements,
            "different": difference.distance.num_different,
            "nan_different": difference.distance.num_nan_different,
            "max_ulps": difference.distance.max_ulps,
        }
    return found


def _line(difference: Difference) -> str:
    distance = difference.distance
    if distance is None:
        return f"{difference.where}: {difference.what}"
    ulps = "" if distance.max_ulps is None else f", at most {distance.max_ulps} ulps apart"
    nans = f", {distance.num_nan_different} with NaN" if distance.num_nan_different else ""
    return f"{difference.where}: {distance.num_different} of {distance.num_elements} elements differ{ulps}{nans}"
