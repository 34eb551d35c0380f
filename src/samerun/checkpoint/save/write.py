"""One rank's files of a checkpoint: its shard, streamed and digested in one pass, and its index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from samerun.checkpoint.tensors import host_bytes
from samerun.core.canonical import canonical_bytes
from samerun.format import names
from samerun.format.blocks import BLOCK_BYTES, BlockWriter
from samerun.format.schema import INDEX_SCHEMA, Chunk, DataFile, FileEntry, Index, RankTensor
from samerun.format.sealed import to_document
from samerun.format.shard import ShardItem, shard_header, write_order
from samerun.state.fingerprint import tensor_digest

if TYPE_CHECKING:
    from samerun.checkpoint.save.stage import Piece, Staged
    from samerun.storage.api import Storage

Hook = Callable[[str], None]


def write_rank(storage: Storage, name: str, rank: int, staged: Staged, at: Hook) -> list[FileEntry]:
    """Writes this rank's files durably under the checkpoint's prefix; returns what the manifest must say of them."""
    prefix = names.checkpoint_prefix(name)
    pieces: list[Piece] = []
    file: DataFile | None = None
    starts: list[int] = []
    entries: list[FileEntry] = []
    if staged.pieces:
        file, entry, pieces, starts = _write_shard(storage, prefix, rank, staged, at)
        entries.append(entry)
        at("save:shard")
    index = _index(name, rank, staged, file, list(zip(pieces, starts, strict=True)))
    entries.append(_write_index(storage, f"{prefix}/{names.index_file(rank)}", index, rank))
    at("save:index")
    storage.sync(prefix)
    return entries


def _write_shard(
    storage: Storage, prefix: str, rank: int, staged: Staged, at: Hook
) -> tuple[DataFile, FileEntry, list[Piece], list[int]]:
    file_name, pieces = names.data_file(rank), staged.pieces
    items = [_item(piece) for piece in pieces]
    order = write_order(items)
    head, starts = shard_header([items[i] for i in order], where=file_name)
    ordered = [pieces[i] for i in order]
    with storage.writer(f"{prefix}/{file_name}") as writer, BlockWriter(writer, head) as blocks:
        for piece in ordered:
            _digest(piece, staged)  # while the thread of `blocks` is busy with what was written before
            blocks.write(host_bytes(piece.tensor))
        blocks.finish()
        at("save:writing")
        writer.publish()
        sha256, digests = blocks.digests()
    file = DataFile(
        name=file_name, num_bytes=blocks.num_bytes, head_bytes=len(head), block_bytes=BLOCK_BYTES, blocks=digests
    )
    return file, FileEntry(file_name, blocks.num_bytes, sha256), ordered, starts


def _digest(piece: Piece, staged: Staged) -> None:
    unread = staged.unread
    if unread is not None and unread.wants(piece.component, piece.key) and piece.tensor.numel():
        unread.note(piece.component, piece.key, tensor_digest(piece.tensor))


def _item(piece: Piece) -> ShardItem:
    offsets = piece.box.offsets if piece.box is not None and piece.is_part else None
    shape = piece.box.lengths if piece.box is not None else tuple(piece.tensor.shape)
    return ShardItem(name=names.shard_key(piece.component, piece.key, offsets), dtype=piece.dtype, shape=shape)


def _index(name: str, rank: int, staged: Staged, file: DataFile | None, placed: list[tuple[Piece, int]]) -> Index:
    chunks: dict[str, dict[str, tuple[Chunk, ...]]] = {}
    own: dict[str, dict[str, RankTensor]] = {}
    for piece, start in placed:
        if piece.box is None:
            entry = RankTensor(piece.dtype, tuple(piece.tensor.shape), start)
            own.setdefault(piece.component, {})[piece.key] = entry
        else:
            known = chunks.setdefault(piece.component, {})
            chunk = Chunk(piece.box.offsets, piece.box.lengths, start)
            known[piece.key] = (*known.get(piece.key, ()), chunk)
    return Index(
        schema=INDEX_SCHEMA,
        checkpoint=name,
        rank=rank,
        file=file,
        chunks=chunks,
        rank_tensors=own,
        plain=staged.plain,
        digests=staged.digests if staged.unread is None else staged.unread.all(),
    )


def _write_index(storage: Storage, key: str, index: Index, rank: int) -> FileEntry:
    data = canonical_bytes(_document(index))
    with storage.writer(key) as writer:
        writer.write(data)
        writer.publish()
    return FileEntry(names.index_file(rank), len(data), hashlib.sha256(data).hexdigest())


def _document(index: Index) -> dict[str, Any]:
    return to_document(index)
