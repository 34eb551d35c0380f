"""One checkpoint in a directory of its own: claimed by one save, published once, never written over. No torch.

    claim      rank 0 finds the directory empty and puts `writing.json` there (one winner), with the checkpoint's name
    write      every rank reads the claim, so a path that is not shared is noticed before a byte is written
    publish    `manifest.json` is put if absent: the commit point; then the claim is removed

A crash leaves a directory without a manifest, which no reader accepts and no later save writes into.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samerun.checkpoint.catalog import check_sizes, parse_manifest, read_entry
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.lookup import view
from samerun.core.canonical import canonical_bytes
from samerun.errors import AlreadyExistsError, NotFoundError, StorageError, UnfinishedError
from samerun.format import names, schema
from samerun.format.sealed import decode_document, seal, to_document
from samerun.storage.opening import open_storage

if TYPE_CHECKING:
    from samerun.format.schema import Manifest
    from samerun.storage.api import Storage

CLAIM: Final = "writing.json"
CLAIM_SCHEMA: Final = "ckpt.claim.v1"


def storage_at(path: str | os.PathLike[str] | Storage) -> Storage:
    """The storage whose root is the checkpoint."""
    if not isinstance(path, (str, os.PathLike)):
        return path
    return open_storage(path if isinstance(path, str) else Path(path))


def claim(storage: Storage, own: Collection[str]) -> str:
    """Takes the empty directory for one save; returns the new checkpoint's name.

    What an earlier failed save of the names in `own` left is removed first. AlreadyExistsError otherwise.
    """
    found = storage.names("")
    if CLAIM in found and names.MANIFEST not in found and claimed(storage) in own:
        clear(storage)
        found = storage.names("")
    if names.MANIFEST in found:
        raise _taken(storage, "holds a checkpoint already, and one is never written over; save to a new path")
    if found:
        raise _taken(
            storage,
            f"is not empty ({', '.join(found[:3])}): another save is under way or never finished, or it holds other "
            f"files; save to a new path, or remove it first",
        )
    name = names.checkpoint_name(0)
    storage.put_if_absent(CLAIM, canonical_bytes({"schema": CLAIM_SCHEMA, "checkpoint": name}))
    return name


def claimed(storage: Storage) -> str:
    """The name under which the directory is being written; StorageError where no claim is seen."""
    try:
        data = storage.get(CLAIM, max_bytes=schema.MAX_SMALL_DOCUMENT_BYTES).data
    except NotFoundError as error:
        raise StorageError(
            errno.ENOENT, "rank 0 claimed this path, but this rank does not see it; is it shared by all?", storage.where
        ) from error
    name = decode_document(data, schema=CLAIM_SCHEMA, where=f"{storage.where}/{CLAIM}").get("checkpoint")
    if not isinstance(name, str) or not names.is_checkpoint_name(name):
        raise StorageError(errno.EINVAL, "its claim names no checkpoint", storage.where)
    return name


def publish(storage: Storage, manifest: Manifest) -> None:
    """The commit: every file is there with its size, then the manifest, once, durably."""
    whole = view(storage, manifest.name)
    data = seal(to_document(manifest))
    parse_manifest(data, where=manifest.name)  # what no reader would accept is never published
    check_sizes(whole, manifest)
    try:
        storage.put_if_absent(names.MANIFEST, data)
    except AlreadyExistsError:
        if storage.get(names.MANIFEST, max_bytes=schema.MAX_DOCUMENT_BYTES).data != data:
            raise
    with contextlib.suppress(StorageError):  # published: a claim that stays behind misleads nobody
        storage.remove(CLAIM)


def clear(storage: Storage) -> None:
    """Removes what a failed save of ours left; the claim last, so that nobody takes a directory with remains."""
    for name in storage.names(""):
        if name != CLAIM:
            storage.remove(name)
    storage.remove(CLAIM)


def open_checkpoint(storage: Storage) -> Checkpoint:
    """The checkpoint at the root of `storage`: manifest and first index verified. DamagedError, SchemaError."""
    where = f"{storage.where}/{names.MANIFEST}"
    try:
        data = storage.get(names.MANIFEST, max_bytes=schema.MAX_DOCUMENT_BYTES).data
    except NotFoundError as error:
        hint = "a run: give one directory of its checkpoints/" if names.CHECKPOINTS in storage.names("") else ""
        hint = hint or "no checkpoint: the save never finished, or it was written by something else"
        raise UnfinishedError(f"{where}: no manifest; this is {hint}") from error
    name = parse_manifest(data, where=where).name
    whole = view(storage, name)
    return Checkpoint(whole, read_entry(whole, name), rank=0, size=0)


def _taken(storage: Storage, reason: str) -> AlreadyExistsError:
    return AlreadyExistsError(errno.EEXIST, reason, storage.where)
