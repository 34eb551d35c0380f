"""`samerun show`: what one checkpoint holds."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from samerun.checkpoint.catalog import num_elements, read_manifest
from samerun.checkpoint.lookup import find, open_run
from samerun.checkpoint.prune import tags_by_name
from samerun.checkpoint.retired import Retirement
from samerun.cli.checkpoints.costs import cost_line, cost_of
from samerun.cli.checkpoints.samples import show_samples
from samerun.cli.checkpoints.target import answer, catalog_of, describe, describe_retirement, split_target
from samerun.core.units import format_bytes
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.schema import ComponentEntry
from samerun.health.rollback.story import Story, stories


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun show runs/policy-sft@best --tensors")(show)


def show(
    target: Annotated[str, typer.Argument(help="RUN, or RUN@NAME where NAME is a checkpoint or a tag.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor with its dtype and shape.")] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Audit which samples the run's windows took, over all attempts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Show the components, progress and facts of one checkpoint (the newest unless NAME says which).

    With --samples: what the whole run trained on, window by window, without opening the data; exit code 3 when a
    position came twice, was left out, or held other samples than its order says.
    """
    path, name = split_target(target)
    storage = open_run(path)
    if samples:
        show_samples(storage, name, as_json=as_json)
        return
    catalog = catalog_of(storage)
    entry = find(storage, catalog, name)
    retired = next((one.by for one in catalog.retired if one.entry.name == entry.name), None)
    told = [story for story in stories(storage) if story.target == entry.name or _ended(story, retired)]
    manifest, _ = read_manifest(storage, entry.name)
    cost = cost_of(storage, entry)
    components = {key: _component(value, tensors) for key, value in manifest.components.items()}
    described = describe(entry, tags_by_name(storage).get(entry.name, []))
    document = {
        "schema": "samerun.show.v1",
        "run": storage.where,
        **described,
        "components": components,
        "facts": manifest.facts,
        "save": cost,
        "retired": None if retired is None else describe_retirement(retired),
        "recorded": [story.to_json() for story in told],
        "files": [{"name": f.name, "bytes": f.num_bytes, "sha256": f.sha256} for f in manifest.files],
    }
    lines = [f"{entry.name}  attempt {entry.epoch}, {entry.world_size} ranks, {format_bytes(entry.num_bytes)}"]
    if described["tags"]:
        lines.append(f"tags       {' '.join(described['tags'])}")
    lines.append("progress   " + ", ".join(f"{value} {unit}" for unit, value in described["progress"].items()))
    if cost is not None:
        lines.append(cost_line(cost))
    for key, value in components.items():
        lines.append(f"{key:<10} {_summary(value)}")
        lines += [f"    {name}  {dtype} {shape}" for name, (dtype, shape) in value.get("listed", {}).items()]
    lines += [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in manifest.facts.items()]
    if retired is not None:
        lines.append(f"retired    {retired.reason}: no start takes it")
    lines += [line for story in told for line in story.lines()]
    answer(document, lines, as_json=as_json)


def _ended(story: Story, retired: Retirement | None) -> bool:
    return retired is not None and story.record.number == retired.decision


def _component(entry: ComponentEntry, tensors: bool) -> dict[str, Any]:
    sizes = [num_elements(t.shape) * ITEM_BYTES[t.dtype] for t in entry.tensors.values()]
    found: dict[str, Any] = {
        "plain": entry.plain,
        "rank_tensors": entry.rank_tensors,
        "tensors": len(sizes),
        "bytes": sum(sizes),
    }
    if tensors:
        found["listed"] = {key: [t.dtype, list(t.shape)] for key, t in entry.tensors.items()}
    return found


def _summary(component: dict[str, Any]) -> str:
    words = []
    if component["tensors"]:
        words.append(f"{component['tensors']} tensors, {format_bytes(component['bytes'])}")
    if component["plain"] != "none":
        words.append("plain state" + (" of each rank" if component["plain"] == "differ" else ""))
    if component["rank_tensors"] == "differ":
        words.append("tensors of each rank's own")
    return ", ".join(words) or "nothing"
