"""The commit protocol: a fresh directory, every rank's files, proof that they are all there, and last the manifest.

    rank 0  refuses when a newer attempt exists; makes the directory (exclusive, durable)
    all     write shard and index, make them durable, report name, size and digest
    rank 0  reports match the plan chunk for chunk and byte for byte → manifest durable (the commit point) → pointers

A failure on any rank is raised on all of them, and rank 0 takes the unfinished directory away. A crash leaves a
directory without a manifest, which no reader accepts and the next attempt's pruning removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from samerun.checkpoint.attempts import newest_attempt
from samerun.checkpoint.catalog import Entry, entry_of, parse_manifest, read_pointer
from samerun.checkpoint.save.agree import all_ranks, one_rank
from samerun.checkpoint.save.write import write_rank
from samerun.core.canonical import canonical_bytes
from samerun.errors import AlreadyExistsError, DamagedError, FencedError, StorageError, UsageError
from samerun.format import names
from samerun.format.schema import (
    MANIFEST_SCHEMA,
    POINTER_SCHEMA,
    FileEntry,
    Manifest,
    Pointer,
    ProgressEntry,
)
from samerun.format.sealed import seal, to_document

if TYPE_CHECKING:
    from samerun.checkpoint.save.stage import Staged
    from samerun.core.progress import Progress
    from samerun.ranks.group import Group
    from samerun.storage.api import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a save says about itself besides its tensors."""

    epoch: int
    sequence: int
    progress: Progress
    facts: dict[str, Any]
    tags: tuple[str, ...]


def named(group: Group, header: Header) -> tuple[str, Header]:
    """Collective, without a word to the storage: the new checkpoint's name, and the header with rank 0's facts as they
    are now. UsageError when the facts are no JSON.
    """
    updates = header.progress.updates.value
    name, facts = one_rank(group, lambda: [names.checkpoint_name(updates), _as_json(header.facts)])
    return name, replace(header, facts=facts)


def _as_json(facts: dict[str, Any]) -> Any:
    try:
        return json.loads(canonical_bytes(facts))
    except (TypeError, ValueError) as error:
        raise UsageError(f"facts must be JSON with finite numbers: {error}") from error


def write_and_commit(
    storage: Storage, group: Group, name: str, header: Header, staged: Staged, at: Callable[[str], None]
) -> Entry:
    """Collective. Returns the published checkpoint, or raises alike on every rank.

    FencedError when a newer attempt exists.
    """
    one_rank(group, lambda: _begin(storage, name, header.epoch))
    try:
        at("save:staged")
        reports = all_ranks(group, lambda: _report(write_rank(storage, name, group.rank, staged, at), staged))
        manifest = _manifest(name, header, staged, group.size, reports)
        sha256 = one_rank(group, lambda: _publish(storage, group, manifest, reports, staged, at))
    except Exception:
        if group.rank == 0:
            _clean_up(storage, name)
        raise
    return entry_of(manifest, sha256)


def point_at(storage: Storage, group: Group, entry: Entry, header: Header) -> None:
    """Collective: the tags of a published checkpoint, and `latest`. A failure leaves it published."""
    one_rank(group, lambda: _point(storage, entry, header))


def _begin(storage: Storage, name: str, epoch: int) -> None:
    check_fence(storage, epoch)
    storage.make_prefix(names.checkpoint_prefix(name))


def check_fence(storage: Storage, epoch: int) -> None:
    newest = newest_attempt(storage)
    if newest > epoch:
        raise FencedError(
            f"{storage.where}: this process is attempt {epoch}, attempt {newest} has started since; nothing was saved. "
            f"Stop this one: the newer attempt carries the run on"
        )


def move_pointer(storage: Storage, key: str, entry: Entry, *, back: bool = False) -> None:
    """Points `key` at `entry`, unless it names a checkpoint of a newer attempt already and `back` is not wanted."""
    pointer = Pointer(
        schema=POINTER_SCHEMA, name=entry.name, attempt=entry.epoch, manifest_sha256=entry.manifest_sha256
    )
    version = _version(storage, key)
    known = read_pointer(storage, key)
    if known is not None and known.attempt > entry.epoch and not back:
        return
    # Another writer in between wrote a hint as good as this one; the next save moves it on.
    with contextlib.suppress(AlreadyExistsError):
        durable = key != names.LATEST_FILE  # tags keep checkpoints alive; `latest` is only ever a hint
        storage.put_if_unchanged(key, seal(to_document(pointer)), version, durable=durable)


def _version(storage: Storage, key: str) -> str | None:
    try:
        return storage.get(key, max_bytes=2**24).version
    except FileNotFoundError:
        return None


def _report(files: Sequence[FileEntry], staged: Staged) -> dict[str, Any]:
    shared = [piece for piece in staged.pieces if piece.box is not None]
    return {
        "files": [list(msgspec.to_builtins(file)) for file in files],
        "chunks": len(shared),
        "bytes": sum(piece.tensor.numel() * piece.tensor.element_size() for piece in shared),
    }


def _manifest(name: str, header: Header, staged: Staged, num_ranks: int, reports: Sequence[dict[str, Any]]) -> Manifest:
    return Manifest(
        schema=MANIFEST_SCHEMA,
        name=name,
        attempt=header.epoch,
        sequence=header.sequence,
        progress=ProgressEntry(**header.progress.to_json()),
        num_ranks=num_ranks,
        components=staged.components,
        layouts=tuple(staged.plan.layouts),
        files=tuple(FileEntry(*file) for report in reports for file in report["files"]),
        facts=header.facts,
    )


def _publish(
    storage: Storage,
    group: Group,
    manifest: Manifest,
    reports: Sequence[dict[str, Any]],
    staged: Staged,
    at: Callable[[str], None],
) -> str:
    for rank, report in enumerate(reports):
        planned = staged.plan.num_chunks[rank], staged.plan.num_bytes[rank]
        if (report["chunks"], report["bytes"]) != planned:
            raise DamagedError(
                f"{manifest.name}: rank {rank} wrote {report['chunks']} chunks of {report['bytes']} bytes, planned "
                f"were {planned[0]} of {planned[1]}; nothing was published"
            )
    prefix = names.checkpoint_prefix(manifest.name)
    data = seal(to_document(manifest))
    parse_manifest(data, where=manifest.name)  # what no reader would accept is never published
    check_fence(storage, manifest.attempt)
    with storage.writer(f"{prefix}/{names.MANIFEST}") as writer:
        writer.write(data)
        at("save:manifest")
        writer.publish()
    storage.sync(prefix)
    return hashlib.sha256(data).hexdigest()


def _point(storage: Storage, entry: Entry, header: Header) -> None:
    for tag in header.tags:
        move_pointer(storage, names.tag_key(tag), entry)
    move_pointer(storage, names.LATEST_FILE, entry)


def _clean_up(storage: Storage, name: str) -> None:
    # The failure that led here is being raised; what cannot be removed now has no manifest and is pruned later.
    with contextlib.suppress(StorageError):
        storage.discard(names.checkpoint_prefix(name), names.MANIFEST)
