"""Checking a checkpoint without loading it: every byte of every file against its digests, every chunk against its plan.

Stronger than a load in one way (whole files by SHA-256, headers too) and weaker in none. No torch, bounded memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from samerun.checkpoint.catalog import read_manifest
from samerun.checkpoint.load.indexes import read_index
from samerun.checkpoint.save.plan import layout_box
from samerun.errors import CheckpointError, DamagedError, NotFoundError, StorageError
from samerun.format import names
from samerun.format.codec import decode_plain
from samerun.format.shard import MAX_HEADER_BYTES, header_entry

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Catalog
    from samerun.format.schema import DataFile, FileEntry, Index, Manifest
    from samerun.storage.api import Storage

_Expected = dict[tuple[str, str], set[tuple[tuple[int, ...], tuple[int, ...]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was checked of one checkpoint. Sound when there are no problems."""

    name: str
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]


def verify_checkpoint(storage: Storage, name: str) -> Verified:
    """Reads all of checkpoint `name`; every problem is named with its file, not only the first."""
    try:
        manifest, _ = read_manifest(storage, name)
    except (CheckpointError, StorageError) as error:
        return Verified(name=name, num_files=0, num_bytes=0, problems=(str(error),))
    problems: list[str] = []
    files = {file.name: file for file in manifest.files}
    expected = _expected_chunks(manifest)
    for rank in range(manifest.num_ranks):
        try:
            index = read_index(storage, manifest, rank)
            _check_index(manifest, index, expected[rank], files)
            if index.file is not None:
                _check_data(storage, manifest, index, index.file, files[index.file.name])
        except (CheckpointError, StorageError) as error:
            problems.append(str(error))
    known = {*files, names.MANIFEST}
    problems += [
        f"{names.checkpoint_prefix(name)}/{stray}: the manifest does not name this file"
        for stray in storage.names(names.checkpoint_prefix(name))
        if stray not in known
    ]
    return Verified(
        name=name,
        num_files=len(files) + 1,
        num_bytes=sum(file.num_bytes for file in manifest.files),
        problems=tuple(problems),
    )


def newest_sound(storage: Storage, catalog: Catalog) -> str:
    """The newest checkpoint whose every byte is right, read whole: what must be known before anything is removed."""
    for entry in catalog.entries:
        if not verify_checkpoint(storage, entry.name).problems:
            return entry.name
    raise DamagedError(f"{storage.where}: no checkpoint is sound, so nothing is removed; see `samerun verify`")


def _expected_chunks(manifest: Manifest) -> list[_Expected]:
    expected: list[_Expected] = [{} for _ in range(manifest.num_ranks)]
    for component, entry in manifest.components.items():
        for key, tensor in entry.tensors.items():
            layout = manifest.layouts[tensor.layout]
            for position, rank in enumerate(layout.ranks):
                box = layout_box(layout, tensor.shape, position)
                if box.volume or len(layout.ranks) == 1:
                    expected[rank].setdefault((component, key), set()).add((box.offsets, box.lengths))
    return expected


def _check_index(manifest: Manifest, index: Index, expected: _Expected, files: dict[str, FileEntry]) -> None:
    where = f"{names.checkpoint_prefix(manifest.name)}/{names.index_file(index.rank)}"
    found: _Expected = {}
    for component, tensors in index.chunks.items():
        for key, chunks in tensors.items():
            found[component, key] = {(chunk.offsets, chunk.lengths) for chunk in chunks}
            if len(found[component, key]) != len(chunks):
                raise DamagedError(f"{where}: {component}/{key}: lists a chunk twice")
    for missing in sorted(expected.keys() - found.keys()):
        raise DamagedError(f"{where}: {'/'.join(missing)}: lists no chunk, the manifest says this rank wrote one")
    for path, boxes in found.items():
        if boxes != expected.get(path):
            raise DamagedError(f"{where}: {'/'.join(path)}: lists other chunks than the manifest says")
    in_manifest = names.data_file(index.rank) in files
    if (index.file is not None) != in_manifest or (index.file is None and (found or index.rank_tensors)):
        raise DamagedError(f"{where}: index and manifest do not agree on whether this rank has a data file")
    for component in manifest.components:
        decode_plain(index.plain.get(component), f"{where}: {component}")


def _check_data(storage: Storage, manifest: Manifest, index: Index, file: DataFile, entry: FileEntry) -> None:
    key = f"{names.checkpoint_prefix(manifest.name)}/{file.name}"
    _check_header(storage, manifest, index, key)
    sha256, head, blocks, num_bytes = hashlib.sha256(), xxhash.xxh3_128(), [], 0
    try:
        reader = storage.reader(key)
    except NotFoundError as error:
        raise DamagedError(f"{key}: missing; the manifest names it with {entry.num_bytes} bytes") from error
    try:
        if not reader.size_bytes == entry.num_bytes == file.num_bytes:
            raise DamagedError(f"{key}: {reader.size_bytes} bytes, the manifest says {entry.num_bytes}")
        buffer = memoryview(bytearray(file.block_bytes))
        while num_bytes < entry.num_bytes:
            end = file.head_bytes if num_bytes < file.head_bytes else entry.num_bytes
            part = buffer[: min(file.block_bytes, end - num_bytes)]
            reader.read_into(num_bytes, part)
            sha256.update(part)
            if num_bytes < file.head_bytes:
                head.update(part)
            else:
                blocks.append(xxhash.xxh3_128_hexdigest(part))
            num_bytes += len(part)
    finally:
        reader.close()
    if sha256.hexdigest() != entry.sha256:
        raise DamagedError(f"{key}: SHA-256 is {sha256.hexdigest()}, the manifest says {entry.sha256}")
    if "".join([head.hexdigest(), *blocks]) != file.blocks:
        raise DamagedError(f"{key}: its block digests are not those of the index")


def _check_header(storage: Storage, manifest: Manifest, index: Index, key: str) -> None:
    """The head that any safetensors reader goes by must say what the index says."""
    reader = storage.reader(key)
    try:
        size = bytearray(8)
        reader.read_into(0, memoryview(size))
        length = struct.unpack("<Q", size)[0]
        if length > min(MAX_HEADER_BYTES, reader.size_bytes - 8):
            raise DamagedError(f"{key}: claims a header of {length} bytes in a file of {reader.size_bytes}")
        text = bytearray(length)
        reader.read_into(8, memoryview(text))
    finally:
        reader.close()
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{key}: its header is not JSON ({error})") from error
    if 8 + length != index_head_bytes(index):
        raise DamagedError(f"{key}: its header ends at byte {8 + length}, the index says otherwise")
    if not isinstance(header, dict) or {k: v for k, v in header.items() if k != "__metadata__"} != _header(
        manifest, index, 8 + length
    ):
        raise DamagedError(f"{key}: its header does not describe the tensors of the index")


def index_head_bytes(index: Index) -> int:
    return index.file.head_bytes if index.file is not None else 0


def _header(manifest: Manifest, index: Index, data_start: int) -> dict[str, Any]:
    """What the header must say, rebuilt from the index."""
    items: list[tuple[str, str, tuple[int, ...], int]] = []
    for component, chunked in index.chunks.items():
        for key, chunks in chunked.items():
            tensor = manifest.components[component].tensors[key]
            is_part = len(manifest.layouts[tensor.layout].ranks) > 1
            items += [
                (names.shard_key(component, key, c.offsets if is_part else None), tensor.dtype, c.lengths, c.start)
                for c in chunks
            ]
    for component, tensors in index.rank_tensors.items():
        for key, own in tensors.items():
            items.append((names.shard_key(component, key, None), own.dtype, own.shape, own.start))
    return {name: header_entry(dtype, shape, start - data_start) for name, dtype, shape, start in items}
