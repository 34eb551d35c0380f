"""DCP's own `.metadata`, which is a raw pickle, read without importing or calling anything that it names.

Its class names are looked up in a fixed table of empty records made afresh for each file; whatever else it asks for is
refused by name. So a hostile file can shape these records and nothing else. The pure Python unpickler is used, because
the C one reserves as much memory as a memo index claims.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samerun.errors import DamagedError, NotFoundError, SchemaError
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.layout import Box

METADATA: Final = ".metadata"
MAX_METADATA_BYTES: Final = 2**30
_RECORDS: Final = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where the bytes of one item lie."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Span], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a DCP directory says it holds."""

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Span]
    paths: Mapping[str, tuple[str | int, ...]]


class _Record:
    """Anything that a `.metadata` makes: the arguments it was made with, and its fields."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Record:
        record = super().__new__(cls)
        record.__dict__["made_of"] = args
        return record

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["made_of"] = state


class _Unpickler(pickle._Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known: dict[tuple[str, str], Any] = {("torch", "Size"): type("Size", (tuple,), {})}
        for module, names in _RECORDS.items():
            self._known.update({(module, name): type(name, (_Record,), {}) for name in names})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and name in ITEM_BYTES:
            return name  # a dtype: its name is enough
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no DCP metadata needs")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside")


def read_listing(folder: Path) -> Listing:
    """The metadata of a DCP directory, every field checked. SchemaError or DamagedError otherwise."""
    path = folder / METADATA
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise SchemaError(f"{path}: larger than {MAX_METADATA_BYTES} bytes")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(
            2, "no .metadata: the save never finished, or this is no DCP checkpoint", str(path)
        ) from error
    try:
        return _listing(_Unpickler(data).load())
    except Exception as error:  # an unpickler raises anything on damaged input
        raise DamagedError(f"{path}: is not metadata of a DCP checkpoint ({type(error).__name__}: {error})") from error


def _listing(found: Any) -> Listing:
    spans: dict[tuple[str, tuple[int, ...] | None], Span] = {}
    for index, info in found.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise SchemaError(
                f"{index.fqn}: was written through an extension; load it with the extension and save again"
            )
        offset = getattr(index, "offset", None)
        span = Span(file=_plain_name(info.relative_path), start=_count(info.offset), num_bytes=_count(info.length))
        spans[_text(index.fqn), None if offset is None else _shape(offset)] = span
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, Span] = {}
    for key, entry in found.state_dict_metadata.items():
        if type(entry).__name__ == "BytesStorageMetadata":
            values[_text(key)] = spans[key, None]
        else:
            chunks = [Box(_shape(chunk.offsets), _shape(chunk.sizes)) for chunk in entry.chunks]
            dtype = entry.properties.made_of[0]
            if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
                raise SchemaError(f"{key}: has no dtype")
            placed = tuple((box, spans[key, box.offsets]) for box in chunks if box.volume)
            tensors[_text(key)] = SavedTensor(dtype=dtype, shape=_shape(entry.size), chunks=placed)
    paths = {_text(key): tuple(map(_part, path)) for key, path in (found.planner_data or {}).items()}
    return Listing(tensors=tensors, values=values, paths=paths)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise SchemaError(f"a key is a {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise SchemaError(f"{str(value)[:40]} is no size")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 64:
        raise SchemaError("a shape is no tuple of up to 64 sizes")
    return tuple(map(_count, value))


def _part(value: Any) -> str | int:
    if type(value) is int:
        return _count(value)
    return _text(value)


def _plain_name(name: Any) -> str:
    text = _text(name)
    if text in ("", ".", "..") or "/" in text or "\\" in text or "\0" in text:
        raise SchemaError(f"the file name {text[:80]!r} leaves the directory")
    return text
