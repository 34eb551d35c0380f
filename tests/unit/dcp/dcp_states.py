"""States and small helpers that the tests of the DCP plug-in share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samerun.format.sealed import seal


def mixed(number: int) -> dict[str, Any]:
    """Everything that a training state is made of; other values for another `number`."""
    generator = torch.Generator().manual_seed(number)
    model = nn.Linear(7, 13)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * number)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"milestones": Counter({30: number, 80: 1}), "best": float("inf"), "last": number},
        "history": {},
        "pair": (number, torch.full((3,), float(number))),
        "text": f"number {number}",
        "raw": bytes([number]),
        "nothing": None,
        "scalar": torch.tensor(number, dtype=torch.int64),
        "hollow": torch.zeros(0, 3),
        "half": torch.full((5,), number, dtype=torch.bfloat16),
        "complex": torch.full((3,), number * 1j, dtype=torch.complex128),
        "table": {0: {"memory": torch.full((2,), float(number)), "count": number, "empty": {}}},
    }


def differences(left: Any, right: Any, path: str = "state") -> list[str]:
    """Where two states differ: types, keys and their order, dtypes, shapes, bytes."""
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__} and {type(right).__name__}"]
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return [] if same else [f"{path}: {left} and {right}"]
    if isinstance(left, dict):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} and {list(right)}"]
        return [text for key in left for text in differences(left[key], right[key], f"{path}[{key!r}]")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} and {len(right)} items"]
        pairs = enumerate(zip(left, right, strict=True))
        return [text for number, (a, b) in pairs for text in differences(a, b, f"{path}[{number}]")]
    return [] if left == right else [f"{path}: {left!r} and {right!r}"]


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest as an attacker would: it is sealed again and proves itself."""
    manifest = path / "manifest.json"
    tree = json.loads(manifest.read_text())
    edit(tree)
    manifest.write_bytes(seal(tree))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))
