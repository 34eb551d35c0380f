"""What the commands' arguments mean, and how they answer: one JSON document, or lines for people."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.checkpoint.catalog import Catalog, Entry, read_catalog, read_pointer
from samerun.checkpoint.prune import tags
from samerun.dcp.directory import as_run
from samerun.errors import UsageError
from samerun.format import names
from samerun.storage.opening import is_url, open_storage

if TYPE_CHECKING:
    from samerun.storage.api import Storage


def open_run(path: str) -> Storage:
    """The storage of a run that exists; UsageError with what to write otherwise."""
    storage = open_storage(path)
    if not is_url(path) and not Path(path).is_dir():
        raise UsageError(f"{path}: no such directory; write the path that Run(...) was given")
    found = storage.names("")
    if names.MANIFEST in found:  # one checkpoint by itself, as samerun.dcp.Writer makes it
        return as_run(storage)
    if not any(name in (names.RUN_FILE, names.CHECKPOINTS) for name in found):
        raise UsageError(f"{path}: holds no run; write the path that Run(...) was given, like runs/policy-sft")
    return storage


def split_target(target: str) -> tuple[str, str]:
    """`RUN@NAME` as (run, name); the name defaults to the newest."""
    path, _, name = target.rpartition("@") if "@" in target else (target, "", "")
    return path, name


def find(storage: Storage, catalog: Catalog, name: str) -> Entry:
    """The checkpoint of that name, unique beginning of a name, or tag; the newest for "" and `newest`.

    `latest` is the pointer's checkpoint: what was published last, which is not always the newest.
    """
    if not catalog.entries:
        raise UsageError(f"{storage.where}: holds no complete checkpoint; `samerun why {storage.where}` says why")
    if name in ("", "newest"):
        return catalog.entries[0]
    wanted = name
    pointer = read_pointer(storage, names.LATEST_FILE) if name == "latest" else None
    wanted = pointer.name if pointer is not None else tags(storage).get(name, name)
    found = [entry for entry in catalog.entries if entry.name.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{storage.where}: {name!r} fits {len(found)} checkpoints; write more of the name")
    for rejected in catalog.rejected:
        if rejected.name.startswith(wanted):
            raise UsageError(f"{storage.where}: {rejected.name} is no complete checkpoint: {rejected.reason}")
    known = ", ".join([*(entry.name for entry in catalog.entries[:4]), *tags(storage)])
    raise UsageError(f"{storage.where}: no checkpoint or tag {name!r}; there are {known}")


def tags_by_name(storage: Storage) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = {}
    for tag, name in sorted(tags(storage).items()):
        by_name.setdefault(name, []).append(tag)
    return by_name


def catalog_of(storage: Storage) -> Catalog:
    return read_catalog(storage)


def describe(entry: Entry, tagged: list[str]) -> dict[str, Any]:
    """An entry as JSON."""
    return {
        "name": entry.name,
        "attempt": entry.epoch,
        "progress": entry.progress.to_json(),
        "ranks": entry.world_size,
        "bytes": entry.num_bytes,
        "tags": tagged,
        "manifest_sha256": entry.manifest_sha256,
    }


def answer(document: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False) if as_json else "\n".join(lines)
    sys.stdout.write(text + "\n")
