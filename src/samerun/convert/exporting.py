"""Exports: weights and buffers of one checkpoint, verified, in a form that others read. Not a run, and it says so."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from samerun.checkpoint.tensors import dtype_name, host_bytes
from samerun.convert import torch_file
from samerun.convert.safetensors_files import INDEX, SINGLE
from samerun.core.canonical import canonical_bytes
from samerun.core.choice import Choice
from samerun.errors import AlreadyExistsError, MismatchError, UsageError
from samerun.format import names
from samerun.format.dtypes import safetensors_dtype
from samerun.format.shard import ShardItem, shard_header, write_order
from samerun.storage.local import Local

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.checkpoint.load.source import CheckpointSource

EXPORT_SCHEMA: Final = "ckpt.export.v1"
MAX_SHARD_BYTES: Final = 5 * 10**9


class Form(Choice):
    """The form of an export: a Hugging Face directory, one safetensors file, or one file of torch.save."""

    HF = "hf"
    SAFETENSORS = "safetensors"
    TORCH = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: of which checkpoint, files with size and SHA-256, tensors, and second names of tied ones."""

    checkpoint: str
    files: tuple[tuple[str, int, str], ...]
    num_tensors: int
    tied: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A tensor of the checkpoint that is to be exported."""

    key: str
    source: CheckpointSource
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.source.read_into(self.key, tensor)
        return tensor


def export(
    checkpoint: Checkpoint, destination: str | Path, form: Form, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Exported:
    """Writes the weights and buffers of an opened checkpoint to `destination`, a new directory (hf) or a new file.

    Every byte is verified before it is written. A directory gets `export.json`, by which `Run` and `samerun` know that
    it is no run; the manifest's digest in it says where it came from. Buffers that differed between ranks are rank 0's.
    Memory: one tensor at a time, all of them for `torch`. Raises AlreadyExistsError when something is there.
    """
    path = Path(destination)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise AlreadyExistsError(17, "there is something already; export to a new path", str(path))
    named = _tensors(checkpoint)
    tied = _tied(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    files: tuple[tuple[str, int, str], ...]
    if form is Form.TORCH:
        tensors = {tensor.key: tensor.read() for tensor in named}
        torch_file.write(path, tensors | {second: tensors[first] for second, first in tied.items()})
        files = (_described(path),)
    elif form is Form.SAFETENSORS:
        _write_shard(Local(path.parent), path.name, named)
        files = (_described(path),)
    else:
        files = _write_directory(path, named, max_shard_bytes)
        origin = {"checkpoint": checkpoint.entry.name, "manifest_sha256": checkpoint.entry.manifest_sha256}
        record = {"schema": EXPORT_SCHEMA, **origin, "files": [list(file) for file in files], "tied": tied}
        Local(path).put_if_absent(names.EXPORT_FILE, canonical_bytes(record))
    return Exported(checkpoint=checkpoint.entry.name, files=files, num_tensors=len(named), tied=tied)


def _tensors(checkpoint: Checkpoint) -> list[_Named]:
    if "weights" not in checkpoint.components:
        raise MismatchError(
            f"{checkpoint.entry.name}: has no component 'weights' to export, only {checkpoint.components}"
        )
    found: dict[str, _Named] = {}
    for component in ("weights", "buffers"):
        if component not in checkpoint.components:
            continue
        source = checkpoint.source(component)
        for key, spec in source.specs.items():
            if key in found:
                raise MismatchError(f"{checkpoint.entry.name}: {key} is a weight and a buffer")
            found[key] = _Named(key=key, source=source, dtype=spec.dtype, shape=spec.shape)
    return [found[key] for key in sorted(found)]


def _tied(checkpoint: Checkpoint) -> dict[str, str]:
    plain: Any = checkpoint.source("weights").plain
    aliases = plain.get("aliases", {}) if isinstance(plain, dict) else {}
    return {str(second): str(first) for second, first in aliases.items()}


def _write_directory(path: Path, named: Sequence[_Named], max_shard_bytes: int) -> tuple[tuple[str, int, str], ...]:
    shards = list(_shards(named, max_shard_bytes))
    file_names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        file_names = [SINGLE]
    path.mkdir(exist_ok=True)
    storage = Local(path)
    for name, shard in zip(file_names, shards, strict=True):
        _write_shard(storage, name, shard)
    if len(shards) > 1:
        table = {t.key: name for name, shard in zip(file_names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(t.num_bytes for t in named)}, "weight_map": table}
        storage.put_if_absent(INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
        file_names.append(INDEX)
    return tuple(_described(path / name) for name in file_names)


def _shards(named: Sequence[_Named], max_bytes: int) -> Iterator[list[_Named]]:
    shard: list[_Named] = []
    for tensor in named:
        if shard and sum(t.num_bytes for t in shard) + tensor.num_bytes > max_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write_shard(storage: Local, name: str, named: Sequence[_Named]) -> None:
    for tensor in named:
        if safetensors_dtype(dtype_name(tensor.dtype, tensor.key)) is None:
            raise UsageError(f"{tensor.key}: safetensors has no {tensor.dtype}; export it with --to torch")
    items = [ShardItem(name=t.key, dtype=dtype_name(t.dtype, t.key), shape=t.shape) for t in named]
    order = write_order(items)
    head, _ = shard_header([items[i] for i in order], where=name)
    with storage.writer(name) as writer:
        writer.write(head)
        for i in order:
            writer.write(host_bytes(named[i].read()))
        writer.publish()
    storage.sync("")


def _described(path: Path) -> tuple[str, int, str]:
    with path.open("rb") as file:
        return path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
