"""Safetensors: one file, or a Hugging Face directory whose index says which file holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from samerun.errors import DamagedError, NotFoundError, SchemaError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MAX_INDEX_BYTES: Final = 2**28


def read_directory(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory; DamagedError when index and files do not say the same."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise NotFoundError(2, f"holds neither {SINGLE} nor {INDEX}", str(folder))
        return read_file(folder / SINGLE)
    table = _weight_map(folder / INDEX)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(table.values())):
        found = read_file(folder / name)
        expected = {key for key, file in table.items() if file == name}
        if set(found) != expected:
            odd = min(set(found) ^ expected)
            raise DamagedError(f"{folder / name}: {odd} is in {'the file' if odd in found else 'the index'} only")
        tensors |= found
    return tensors


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of one file, in host memory."""
    if not path.is_file():
        raise DamagedError(f"{path}: missing; the index names it")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dict
    except SafetensorError as error:
        raise DamagedError(f"{path}: {error}") from error


def _weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise SchemaError(f"{path}: larger than {MAX_INDEX_BYTES} bytes")
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = dict(found).values()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SchemaError(f"{path}: is no index of safetensors files ({error})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise SchemaError(f"{path}: names the file {str(name)[:80]!r}")
    return dict(found)
