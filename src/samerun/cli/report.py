"""`samerun report`: one HTML file about a run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from samerun.checkpoint.lookup import open_run
from samerun.errors import DamagedError
from samerun.report.gather import gather
from samerun.report.page import page


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun report runs/policy-sft")(report)


def report(
    run: Annotated[str, typer.Argument(help="The run's path.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write; by default the run's name with .html, here.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The same as one JSON document on standard output; a file only with --out.")
    ] = False,
) -> None:
    """Write one HTML file about RUN: its attempts, loss and times, checkpoints, what was noticed and decided.

    Reads what the run has written and changes nothing, also while it is running. The file loads nothing from anywhere.
    """
    storage = open_run(run)
    try:
        told = gather(storage)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{storage.where}: a record of the run cannot be read ({error!r})") from error
    file = out if out is not None or as_json else Path(_file_name(run))
    if file is not None:
        file.write_text(page(told), encoding="utf-8")
    if as_json:
        document = {**told.to_json(), "file": None if file is None else str(file)}
        sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        sys.stdout.write(f"{file}: {len(told.attempts)} attempts, {len(told.windows)} windows\n")


def _file_name(run: str) -> str:
    """`runs/policy-sft` and `s3://bucket/policy-sft/` alike: policy-sft.html."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.rstrip("/").rpartition("/")[2]).strip("-.")
    return f"{name or 'run'}.html"
