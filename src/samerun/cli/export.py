"""`samerun export`: the weights of one checkpoint, verified, in a form that others read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from samerun.checkpoint.lookup import open_run
from samerun.cli.checkpoints.target import answer, split_target
from samerun.core.units import format_bytes


class To(Enum):
    HF = "hf"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun export runs/policy-sft@best out --to hf")(export)


def export(
    target: Annotated[str, typer.Argument(help="RUN, or RUN@NAME where NAME is a checkpoint or a tag.")],
    destination: Annotated[Path, typer.Argument(help="A new directory (hf) or file (torch, safetensors).")],
    to: Annotated[To, typer.Option("--to", help="hf: safetensors with an index; torch: torch.save.")] = To.HF,
    max_shard: Annotated[str, typer.Option("--max-shard", help="Largest file of an hf export.")] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Write weights and buffers of one checkpoint to DESTINATION. An export is for use; no run resumes from it."""
    from samerun.convert.run_export import export as write  # torch is loaded here, not for --help

    path, name = split_target(target)
    exported = write(path, destination, checkpoint=name, to=to.value, max_shard=max_shard)
    document = {
        "schema": "samerun.export.v1",
        "run": open_run(path).where,
        "checkpoint": exported.checkpoint,
        "destination": str(destination),
        "form": to.value,
        "tensors": exported.num_tensors,
        "tied": exported.tied,
        "files": [{"name": name, "bytes": size, "sha256": sha256} for name, size, sha256 in exported.files],
    }
    lines = [f"{destination}  {exported.num_tensors} tensors of {exported.checkpoint}"]
    lines += [f"    {name}  {format_bytes(size)}  {sha256}" for name, size, sha256 in exported.files]
    answer(document, lines, as_json=as_json)
