"""Files of torch.save: read weights-only, so that no class is imported and no code runs; written for exports."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samerun.errors import DamagedError


def decode(source: Path | io.BytesIO, where: str) -> Any:
    """What torch.save wrote; DamagedError for anything that would need code to come back, or is no such file."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DamagedError(
            f"{where}: cannot be read without running its code, or is damaged ({lines[0][:200]})"
        ) from error


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes `tensors` as torch.save does, aside, fsynced, then renamed: the file is whole or not there."""
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("xb") as file:
        torch.save(dict(tensors), file)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
