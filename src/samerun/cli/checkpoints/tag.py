"""`samerun tag`: names for checkpoints, which keep them from being removed."""

from __future__ import annotations

from typing import Annotated

import typer

from samerun.checkpoint.lookup import find, open_run
from samerun.checkpoint.save.commit import move_pointer
from samerun.cli.checkpoints.target import answer, catalog_of, split_target
from samerun.errors import UsageError
from samerun.format import names


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun tag runs/policy-sft@u000001840-1f3a9c2e paper")(tag)


def tag(
    target: Annotated[str, typer.Argument(help="RUN, or RUN@NAME where NAME is a checkpoint or a tag.")],
    name: Annotated[str, typer.Argument(help="The tag.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag; the checkpoint stays.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Point the tag NAME at a checkpoint (the newest unless @NAME says which). Tagged checkpoints are never removed."""
    path, wanted = split_target(target)
    storage = open_run(path)
    key = names.tag_key(name)
    if remove:
        if key.rsplit("/", 1)[1] not in storage.names(names.TAGS):
            raise UsageError(f"{storage.where}: there is no tag {name!r}")
        storage.remove(key)
        storage.sync(names.TAGS)
        answer({"schema": "samerun.tag.v1", "tag": name, "checkpoint": None}, [f"removed {name}"], as_json=as_json)
        return
    entry = find(storage, catalog_of(storage), wanted)
    move_pointer(storage, key, entry, back=True)
    lines = [f"{name} is {entry.name}"]
    answer({"schema": "samerun.tag.v1", "tag": name, "checkpoint": entry.name}, lines, as_json=as_json)
