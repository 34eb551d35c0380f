"""Which checkpoints a path holds, newest first, and why others are passed over. No torch, no collectives.

Newest is decided by (attempt, windows, sequence) read from manifests: never by name, time or pointer. What a rewind has
retired is listed apart: complete and loadable, but no start takes it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from samerun.checkpoint.retired import Retirement, read_retirements, retirement_of
from samerun.core.progress import Progress
from samerun.errors import CheckpointError, DamagedError, NotFoundError, StorageError, UnfinishedError
from samerun.format import names, schema
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.layout import Box, prove_partition
from samerun.format.schema import Manifest
from samerun.format.sealed import typed, unseal

if TYPE_CHECKING:
    from samerun.storage.api import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One complete checkpoint: all files that its manifest names are there with their sizes."""

    name: str
    epoch: int
    progress: Progress
    sequence: int
    manifest_sha256: str
    world_size: int
    num_bytes: int
    facts: dict[str, Any]

    @property
    def age_key(self) -> tuple[int, int, int, str]:
        """Sorts oldest first."""
        return self.epoch, self.progress.windows.value, self.sequence, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """What lies among the checkpoints and is none, and why."""

    name: str
    reason: str
    committed: bool
    """Whether it has a manifest: it was published once, so passing over it loses work that had been saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """A complete checkpoint on a branch that a rewind has ended."""

    entry: Entry
    by: Retirement


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    entries: tuple[Entry, ...]
    rejected: tuple[Rejected, ...]
    retired: tuple[Retired, ...] = ()
    """Newest first, and in no other list."""


def read_catalog(storage: Storage) -> Catalog:
    """Looks at every manifest and at the size of every file it names; reads no tensor.

    Raises DamagedError or SchemaError for a record of a rewind that cannot be read: what is newest is unknown then.
    """
    entries: list[Entry] = []
    rejected: list[Rejected] = []
    for name in storage.names(names.CHECKPOINTS):
        if not names.is_checkpoint_name(name):
            rejected.append(Rejected(name=name, reason="not a checkpoint of samerun by its name", committed=False))
            continue
        try:
            entries.append(read_entry(storage, name))
        except UnfinishedError as error:
            rejected.append(Rejected(name=name, reason=str(error), committed=False))
        except (CheckpointError, StorageError) as error:
            rejected.append(Rejected(name=name, reason=str(error), committed=True))
    entries.sort(key=lambda entry: entry.age_key, reverse=True)
    retirements = read_retirements(storage)
    judged = [(entry, retirement_of(entry, retirements)) for entry in entries]
    return Catalog(
        entries=tuple(entry for entry, by in judged if by is None),
        rejected=tuple(rejected),
        retired=tuple(Retired(entry=entry, by=by) for entry, by in judged if by is not None),
    )


def read_entry(storage: Storage, name: str) -> Entry:
    manifest, sha256 = read_manifest(storage, name)
    check_sizes(storage, manifest)
    return entry_of(manifest, sha256)


def entry_of(manifest: Manifest, sha256: str) -> Entry:
    return Entry(
        name=manifest.name,
        epoch=manifest.attempt,
        progress=Progress.from_json(msgspec.to_builtins(manifest.progress)),
        sequence=manifest.sequence,
        manifest_sha256=sha256,
        world_size=manifest.num_ranks,
        num_bytes=sum(file.num_bytes for file in manifest.files),
        facts=manifest.facts,
    )


def read_manifest(storage: Storage, name: str) -> tuple[Manifest, str]:
    """The verified manifest of checkpoint `name` and the SHA-256 of its bytes."""
    key = f"{names.checkpoint_prefix(name)}/{names.MANIFEST}"
    try:
        data = storage.get(key, max_bytes=schema.MAX_DOCUMENT_BYTES).data
    except NotFoundError as error:
        raise UnfinishedError(f"{key}: no manifest; the save never finished, or the file was removed") from error
    manifest = parse_manifest(data, where=key)
    if manifest.name != name:
        raise DamagedError(f"{key}: is the manifest of {manifest.name}; it was copied here")
    return manifest, hashlib.sha256(data).hexdigest()


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """A manifest that is consistent in itself: every tensor covered, every rank indexed, no file named twice."""
    manifest = typed(unseal(data, schema=schema.MANIFEST_SCHEMA, where=where), Manifest, where=where)
    files = Counter(file.name for file in manifest.files)
    repeated = [name for name, count in files.items() if count > 1]
    if repeated:
        raise DamagedError(f"{where}: names the file {repeated[0]} {files[repeated[0]]} times")
    indexes = map(names.index_file, range(manifest.num_ranks))  # lazy: the number of ranks is only a claim so far
    missing = next((name for name in indexes if name not in files), None)
    if missing is not None:
        raise DamagedError(f"{where}: names no {missing}, but {manifest.num_ranks} ranks wrote this checkpoint")
    allowed = {name(rank) for rank in range(manifest.num_ranks) for name in (names.index_file, names.data_file)}
    for foreign in sorted(set(files) - allowed):
        raise DamagedError(f"{where}: names {foreign}, but {manifest.num_ranks} ranks wrote this checkpoint")
    _check_tensors(manifest, set(files), where)
    return manifest


def _check_tensors(manifest: Manifest, files: set[str], where: str) -> None:
    proven: set[tuple[int, tuple[int, ...]]] = set()
    total_bytes = 0
    for component, entry in manifest.components.items():
        for key, tensor in entry.tensors.items():
            path = f"{where}: {component}/{key}"
            if tensor.dtype not in ITEM_BYTES:
                raise DamagedError(f"{path}: unknown dtype {tensor.dtype[:40]!r}")
            if tensor.layout >= len(manifest.layouts):
                raise DamagedError(f"{path}: layout {tensor.layout} of {len(manifest.layouts)}")
            total_bytes += num_elements(tensor.shape) * ITEM_BYTES[tensor.dtype]
            if (tensor.layout, tensor.shape) not in proven:
                proven.add((tensor.layout, tensor.shape))
                _check_layout(manifest, manifest.layouts[tensor.layout], tensor.shape, files, path)
    held_bytes = sum(file.num_bytes for file in manifest.files)
    if total_bytes > held_bytes:
        raise DamagedError(f"{where}: tensors of {total_bytes} bytes in files of {held_bytes} bytes")


def _check_layout(
    manifest: Manifest, layout: schema.Layout, shape: tuple[int, ...], files: set[str], path: str
) -> None:
    if (layout.grid is None) == (layout.boxes is None):
        raise DamagedError(f"{path}: a layout has either a grid or boxes")
    if max(layout.ranks) >= manifest.num_ranks:
        raise DamagedError(f"{path}: a chunk on rank {max(layout.ranks)} of {manifest.num_ranks}")
    if layout.boxes is not None:
        if len(layout.boxes) != len(layout.ranks):
            raise DamagedError(f"{path}: {len(layout.boxes)} chunks on {len(layout.ranks)} ranks")
        boxes = []
        for offsets, lengths in layout.boxes:
            if len(offsets) != len(lengths):
                raise DamagedError(f"{path}: a chunk with {len(offsets)} offsets and {len(lengths)} lengths")
            boxes.append(Box(offsets, lengths))
        prove_partition(shape, boxes, where=path)
    elif layout.grid is not None and (
        len(layout.grid) != len(shape) or 0 in layout.grid or num_elements(layout.grid) != len(layout.ranks)
    ):
        raise DamagedError(f"{path}: a grid {list(layout.grid)} on {len(layout.ranks)} ranks for shape {list(shape)}")


def num_elements(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def check_sizes(storage: Storage, manifest: Manifest) -> None:
    """Raises DamagedError naming the first file that is missing or has another size."""
    prefix = names.checkpoint_prefix(manifest.name)
    sizes = storage.sizes(prefix, [file.name for file in manifest.files])
    for file in manifest.files:
        key, found = f"{prefix}/{file.name}", sizes.get(file.name)
        if found is None:
            raise DamagedError(f"{key}: missing; the manifest names it with {file.num_bytes} bytes")
        if found != file.num_bytes:
            raise DamagedError(f"{key}: {found} bytes, the manifest says {file.num_bytes}; the file was cut or changed")


def read_pointer(storage: Storage, key: str) -> schema.Pointer | None:
    """A pointer (`latest.json`, a tag); None when there is none or it is damaged: pointers are only hints.

    Raises StorageError when the storage cannot be asked: a tag not seen for a moment still keeps its checkpoint.
    """
    try:
        data = storage.get(key, max_bytes=schema.MAX_SMALL_DOCUMENT_BYTES).data
        return typed(unseal(data, schema=schema.POINTER_SCHEMA, where=key), schema.Pointer, where=key)
    except (NotFoundError, CheckpointError):
        return None
