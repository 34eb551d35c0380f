"""What lies at a path, and its content: a tree of tensors and plain values, read without running any of its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samerun.convert import dcp_files, safetensors_files, torch_file
from samerun.convert.dcp_records import METADATA
from samerun.dcp import directory
from samerun.dcp.records import COMPONENT, contents_of
from samerun.dcp.values import join_value
from samerun.errors import SchemaError, UsageError
from samerun.format import names
from samerun.storage.local import Local


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A checkpoint of another format: which format, and its state (nested dicts and lists, tensors on the CPU)."""

    kind: str
    """`torch`, `dcp`, `safetensors`, `hf` or `ckpt.v1`."""
    state: dict[str, Any]


def read(source: str | Path) -> Foreign:
    """Reads a torch.save file, a DCP directory, a safetensors file, a Hugging Face directory, or one of ckpt.v1.

    Runs no code of the file: torch.save files and DCP directories are read weights-only, and whatever would need code
    is an error. Everything is read into host memory. What has no digests is believed; ckpt.v1 is verified.
    """
    path = Path(source)
    if path.is_dir():
        found = {entry.name for entry in path.iterdir()}
        if names.MANIFEST in found:
            return Foreign(kind="ckpt.v1", state=_read_checkpoint(path))
        if METADATA in found:
            return Foreign(kind="dcp", state=dcp_files.read_dcp(path))
        if found & {safetensors_files.INDEX, safetensors_files.SINGLE}:
            return Foreign(kind="hf", state=dict(safetensors_files.read_directory(path)))
        raise UsageError(
            f"{path}: is no checkpoint that can be imported; expected {names.MANIFEST}, {METADATA}, "
            f"{safetensors_files.SINGLE} or {safetensors_files.INDEX} in it, or a file"
        )
    if not path.is_file():
        raise UsageError(f"{path}: no such file or directory")
    if path.suffix == ".safetensors":
        return Foreign(kind="safetensors", state=dict(safetensors_files.read_file(path)))
    state = torch_file.decode(path, str(path))
    if not isinstance(state, Mapping) or not all(isinstance(key, (str, int)) for key in state):
        raise SchemaError(f"{path}: holds a {type(state).__name__}; only dicts are imported")
    return Foreign(kind="torch", state={str(key): value for key, value in state.items()})


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    with directory.open_checkpoint(Local(folder)) as checkpoint:
        contents = contents_of(checkpoint)
        leaves: dict[str, tuple[tuple[str | int, ...], Any]] = {}
        paths = contents.metadata.planner_data or {}
        for key, (component, name) in contents.tensors.items():
            source = checkpoint.source(component)
            spec = source.specs[name]
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            source.read_into(name, tensor)
            leaves[key] = paths.get(key, (key,)), tensor
        for key, rank in contents.values.items():
            leaves[key] = paths.get(key, (key,)), join_value(checkpoint, COMPONENT, rank, key)
    return dcp_files.nested(leaves, where=str(folder))
