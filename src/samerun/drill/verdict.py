"""The verdict of a drill: each component `same` or its first difference, and what caused it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samerun.checkpoint import Checkpoint, Store
from samerun.drill.traces import First, Line, causes, first_differences
from samerun.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    components: Mapping[str, First | None]
    cause: Sequence[str]
    problem: str | None = None
    """Why there is nothing to compare, if so: a run that never finished is not the same run."""

    @property
    def same(self) -> bool:
        return self.problem is None and all(first is None for first in self.components.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": "same" if self.same else "differs",
            "components": {
                name: {
                    "verdict": "same" if first is None else "differs",
                    "first": None if first is None else first.to_json(),
                }
                for name, first in self.components.items()
            },
            "cause": list(self.cause),
        }


def compare(twin: list[Line], other: list[Line], *, twin_path: str, other_path: str) -> Verdict:
    """Compares every edge of every attempt with the twin's, and the final tensors for the size of a difference."""
    found = first_differences(twin, other)
    if any(first is not None and first.size is None for first in found.values()):
        sizes = _final_sizes(twin_path, other_path)
        found = {name: _with_size(name, first, sizes) for name, first in found.items()}
    return Verdict(components=found, cause=causes(other))


def _with_size(component: str, first: First | None, sizes: Mapping[str, float]) -> First | None:
    if first is None or first.size is not None:
        return first
    return First(update=first.update, rank=first.rank, key=first.key, size=sizes.get(f"{component}/{first.key}"))


def _final_sizes(one: str, other: str) -> dict[str, float]:
    """Largest absolute difference per tensor of the newest checkpoints of two runs, for tensors that both have.

    Empty where a run has no readable checkpoint: sizes adorn a verdict that stands without them.
    """
    try:
        first, second = _newest(one), _newest(other)
        return {} if first is None or second is None else _sizes(first, second)
    except CheckpointError:
        return {}


def _sizes(first: Checkpoint, second: Checkpoint) -> dict[str, float]:
    sizes = {}
    for component in sorted(set(first.components) & set(second.components)):
        left, right = first.source(component), second.source(component)
        for key in sorted(set(left.specs) & set(right.specs)):
            if left.specs[key] == right.specs[key] and left.specs[key].dtype.is_floating_point:
                values = []
                for source in (left, right):
                    tensor = torch.zeros(source.specs[key].shape, dtype=source.specs[key].dtype)
                    source.read_into(key, tensor)
                    values.append(tensor.double())
                sizes[f"{component}/{key}"] = float((values[0] - values[1]).abs().max()) if values[0].numel() else 0.0
    return sizes


def _newest(path: str) -> Checkpoint | None:
    store = Store(path)
    entries = store.catalog().entries
    return store.open(entries[0]) if entries else None
