"""`samerun import`: a foreign checkpoint becomes one of ckpt.v1, for new runs to begin from."""

from __future__ import annotations

from typing import Annotated

import typer

from samerun.cli.checkpoints.target import answer
from samerun.core.units import format_bytes


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun import ckpt/step-100 runs/imported")(import_)


def import_(
    source: Annotated[
        str, typer.Argument(help="A file of torch.save or safetensors; a DCP or Hugging Face directory.")
    ],
    run: Annotated[str, typer.Argument(help="A new path.")],
    weights: Annotated[str | None, typer.Option("--weights", help="The key that holds the model's tensors.")] = None,
    buffers: Annotated[
        list[str] | None, typer.Option("--buffer", help="Names of buffers, like '*.running_mean'; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Read SOURCE without running any of its code and write it as a checkpoint at RUN, for samerun.warm_start.

    An import is never a run to resume. Everything is read into memory.
    """
    from samerun.convert import import_checkpoint  # torch is loaded here, not for --help

    entry = import_checkpoint(source, run, weights=weights, buffers=buffers or ())
    kind = entry.facts["import"]["kind"]
    document = {
        "schema": "samerun.import.v1",
        "source": source,
        "kind": kind,
        "run": run,
        "checkpoint": entry.name,
        "bytes": entry.num_bytes,
        "manifest_sha256": entry.manifest_sha256,
    }
    lines = [
        f"{run}@{entry.name}  from {kind}, {format_bytes(entry.num_bytes)}; samerun.warm_start takes it from there"
    ]
    answer(document, lines, as_json=as_json)
