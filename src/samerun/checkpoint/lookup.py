"""What a path and a name stand for: the storage of a run or of one checkpoint, and an entry there. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from samerun.checkpoint.catalog import Catalog, Entry, parse_manifest, read_pointer
from samerun.checkpoint.prune import tags
from samerun.errors import UsageError
from samerun.format import names, schema
from samerun.storage.nested import Nested
from samerun.storage.opening import is_url, open_storage

if TYPE_CHECKING:
    from samerun.storage.api import Storage


def view(storage: Storage, name: str) -> Storage:
    """The checkpoint `name` at the root of `storage`, as a part of a run."""
    return Nested(storage, names.checkpoint_prefix(name))


def as_run(storage: Storage) -> Storage:
    """The checkpoint at the root of `storage` as the only one of a run, for what looks at runs. DamagedError."""
    where = f"{storage.where}/{names.MANIFEST}"
    data = storage.get(names.MANIFEST, max_bytes=schema.MAX_DOCUMENT_BYTES).data
    return view(storage, parse_manifest(data, where=where).name)


def open_run(path: str | Path) -> Storage:
    """The storage of a run that exists, or of one checkpoint by itself; UsageError with what to write otherwise."""
    storage = open_storage(path)
    if not is_url(path) and not Path(path).is_dir():
        raise UsageError(f"{path}: no such directory; write the path that Run(...) was given")
    found = storage.names("")
    if names.MANIFEST in found:  # one checkpoint by itself, as samerun.dcp.Writer makes it
        return as_run(storage)
    if not any(name in (names.RUN_FILE, names.CHECKPOINTS) for name in found):
        raise UsageError(f"{path}: holds no run; write the path that Run(...) was given, like runs/policy-sft")
    return storage


def find(storage: Storage, catalog: Catalog, name: str) -> Entry:
    """The checkpoint of that name, unique beginning of a name, or tag; the newest for "" and `newest`.

    `latest` is the pointer's checkpoint: what was published last, which is not always the newest.
    """
    if not catalog.entries and not catalog.retired:
        raise UsageError(f"{storage.where}: holds no complete checkpoint; `samerun why {storage.where}` says why")
    if name in ("", "newest"):
        if not catalog.entries:
            raise UsageError(f"{storage.where}: every checkpoint is retired; `samerun ls` names them")
        return catalog.entries[0]
    wanted = name
    pointer = read_pointer(storage, names.LATEST_FILE) if name == "latest" else None
    wanted = pointer.name if pointer is not None else tags(storage).get(name, name)
    everything = [*catalog.entries, *(one.entry for one in catalog.retired)]
    found = [entry for entry in everything if entry.name.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{storage.where}: {name!r} fits {len(found)} checkpoints; write more of the name")
    for rejected in catalog.rejected:
        if rejected.name.startswith(wanted):
            raise UsageError(f"{storage.where}: {rejected.name} is no complete checkpoint: {rejected.reason}")
    known = ", ".join([*(entry.name for entry in catalog.entries[:4]), *tags(storage)])
    raise UsageError(f"{storage.where}: no checkpoint or tag {name!r}; there are {known}")
