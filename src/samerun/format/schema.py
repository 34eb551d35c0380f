"""The records of `ckpt.v1`. Every one is strict: unknown fields, other types and numbers beyond a cap are refused.

Where things are said once: the manifest says which tensors there are, of which dtype and shape, and by which layout
they are cut (tensors that are cut alike share one); an index says where in its rank's file each chunk lies, and holds
the digests of that file's blocks. The manifest names every file with its size and SHA-256, indexes too.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from samerun.format import names

MANIFEST_SCHEMA: Final = "ckpt.v1"
INDEX_SCHEMA: Final = "ckpt.index.v1"
RUN_SCHEMA: Final = "ckpt.run.v1"
ATTEMPT_SCHEMA: Final = "ckpt.attempt.v1"
POINTER_SCHEMA: Final = "ckpt.pointer.v1"
RETIRED_SCHEMA: Final = "ckpt.retired.v1"

MAX_DOCUMENT_BYTES: Final = 256 * 2**20
MAX_SMALL_DOCUMENT_BYTES: Final = 16 * 2**20
MAX_RANKS: Final = 1_000_000

Natural = Annotated[int, Meta(ge=0, le=2**62)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Shape = Annotated[tuple[Natural, ...], Meta(max_length=64)]
Name = Annotated[str, Meta(pattern=rf"\A{names.CHECKPOINT_PATTERN}\Z")]
Component = Annotated[str, Meta(pattern=rf"\A{names.COMPONENT_PATTERN}\Z")]
Key = Annotated[str, Meta(min_length=1, max_length=names.MAX_KEY_CHARACTERS)]
FileName = Annotated[str, Meta(pattern=rf"\A(?:{names.DATA_FILE_PATTERN}|{names.INDEX_FILE_PATTERN})\Z")]
Shared = Literal["none", "same", "differ"]


class FileEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file of a checkpoint: name, size, SHA-256 of all its bytes."""

    name: FileName
    num_bytes: Natural
    sha256: Sha256


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A global tensor: dtype, shape, and the position of its layout in the manifest's list."""

    dtype: str
    shape: Shape
    layout: Natural


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a tensor is cut: a regular `grid`, else explicit `boxes` ([offsets, lengths]); `ranks` hold the chunks."""

    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1)]
    grid: Shape | None = None
    boxes: tuple[tuple[Shape, Shape], ...] | None = None


class ComponentEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One component: whether ranks had the same plain state and the same tensors of their own, and its tensors."""

    plain: Shared
    rank_tensors: Shared
    tensors: dict[Key, TensorEntry]


class ProgressEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    windows: Natural
    skipped: Natural
    updates: Natural
    samples: Natural
    tokens: Natural


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is. It exists last, so what it names is complete."""

    schema: Literal["ckpt.v1"]
    name: Name
    attempt: Natural
    sequence: Natural
    """How many saves this attempt had published before: orders two saves of one window."""
    progress: ProgressEntry
    num_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    components: dict[Component, ComponentEntry]
    layouts: tuple[Layout, ...]
    files: tuple[FileEntry, ...]
    facts: dict[str, Any]


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk in a data file: its box in the tensor and the first byte of its elements (row-major) in the file."""

    offsets: Shape
    lengths: Shape
    start: Natural


class RankTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor of one rank's own, whole: dtype, shape, first byte in the file."""

    dtype: str
    shape: Shape
    start: Natural


class DataFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's data file and one XXH3-128 digest (32 hex digits) per block, run together in one string.

    The first block is the head; the others have `block_bytes` each and start after it.
    """

    name: Annotated[str, Meta(pattern=rf"\A{names.DATA_FILE_PATTERN}\Z")]
    num_bytes: Natural
    head_bytes: Annotated[int, Meta(ge=8, le=2**27)]
    block_bytes: Annotated[int, Meta(ge=2**12, le=2**26)]
    blocks: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{32})*\Z")]


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank wrote: where its chunks are, its own tensors and plain state, and a digest per tensor."""

    schema: Literal["ckpt.index.v1"]
    checkpoint: Name
    rank: Rank
    file: DataFile | None
    chunks: dict[Component, dict[Key, tuple[Chunk, ...]]]
    rank_tensors: dict[Component, dict[Key, RankTensor]]
    plain: dict[Component, Any]
    digests: dict[Component, dict[str, str]]


class Pointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`latest` or a tag: which checkpoint, and what its manifest must hash to."""

    schema: Literal["ckpt.pointer.v1"]
    name: Name
    attempt: Natural
    manifest_sha256: Sha256
