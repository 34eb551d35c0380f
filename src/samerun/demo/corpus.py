"""Real text that is on every machine: the source of Python's standard library, about 30 MB, bytes as tokens.

Files are packed one after another into sequences of fixed length. Indentation and the first byte of a file are not
supervised, so the number of supervised tokens varies from sequence to sequence, as it does in real fine-tuning.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.utils.data import Dataset

IGNORED: Final = -100
_SPACE: Final = 0x20
_SEPARATOR: Final = 0


def write_corpus(path: Path) -> int:
    """Writes every readable .py file of the standard library, zero-separated, in sorted order; returns the bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts and file.is_file())
    with path.open("wb") as out:
        for file in files:
            out.write(bytes([_SEPARATOR]))
            out.write(file.read_bytes())
        return out.tell()


class PackedText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`num_sequences` sequences of `length` tokens, spread evenly over the whole corpus."""

    def __init__(self, path: Path, *, num_sequences: int, length: int) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._length = length
        self._num_sequences = num_sequences
        self._stride = (len(self._bytes) - length - 1) // num_sequences

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._stride
        tokens = torch.from_numpy(self._bytes[start : start + self._length + 1].astype(np.int64))
        inputs, targets = tokens[:-1], tokens[1:].clone()
        indentation = (targets == _SPACE) & (inputs == _SPACE)
        targets[indentation | (targets == _SEPARATOR)] = IGNORED
        return inputs, targets
