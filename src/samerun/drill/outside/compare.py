"""Two folders, leaf by leaf. Exact; what two twins differ in sets the measure for the rest.

Two uninterrupted twins of a program that is not deterministic give one sample of |a − b| for each leaf. The difference
of the interrupted run is another sample of the same spread if nothing is wrong, so up to SPREAD_FACTOR times the
twins' it is not told apart: a wide net, chosen so that a verdict `drift` is not an accident of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

import torch

from samerun.drill.outside.naming import component_of, is_wall_clock
from samerun.drill.outside.outputs import Digest, Leaf, files_in, leaves

SPREAD_FACTOR: Final = 4.0


class Nature(Enum):
    NUMBER = "other numbers"
    """Floating point: what drift looks like."""
    EXACT = "another value"
    """Counters, integers, texts, shapes: never a matter of rounding."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    path: str
    nature: Nature
    size: float | None
    """Largest absolute difference of any element; None where there is nothing to subtract."""

    @property
    def component(self) -> str:
        return component_of(self.path)


def compare_folders(one: Path, other: Path, *, skip: frozenset[Path] = frozenset()) -> list[Difference]:
    """Everything of `one` that `other` lacks or holds differently, apart from wall-clock values.

    What only `other` has is no difference: an interrupted run may leave more behind.
    """
    there = set(files_in(other))
    found = []
    for file in files_in(one):
        if file in skip:
            continue
        if file not in there:
            found.append(Difference(path=str(file), nature=Nature.MISSING, size=None))
            continue
        found += compare_leaves(leaves(one, file), leaves(other, file))
    return found


def compare_leaves(one: Mapping[str, Leaf], other: Mapping[str, Leaf]) -> list[Difference]:
    found = []
    for path in [*one, *(path for path in other if path not in one)]:
        if is_wall_clock(path):
            continue
        if path not in one or path not in other:
            found.append(Difference(path=path, nature=Nature.MISSING, size=None))
        elif (difference := difference_of(path, one[path], other[path])) is not None:
            found.append(_as_draws(difference) if difference.component == "rng" else difference)
    return found


def _as_draws(difference: Difference) -> Difference:
    """Another state of a generator means other draws, whatever its integers are; how far apart says nothing."""
    return replace(difference, nature=Nature.NUMBER, size=None)


def beyond(found: list[Difference], spread: list[Difference]) -> list[Difference]:
    """Those of `found` that the twins' own difference does not explain."""
    known = {difference.path: difference for difference in spread}
    return [difference for difference in found if not _explained(difference, known.get(difference.path))]


def _explained(difference: Difference, twins: Difference | None) -> bool:
    if twins is None:
        return False
    if twins.size is None or difference.size is None:
        return True  # the twins differ there without measure: nothing can be said
    return difference.size <= SPREAD_FACTOR * twins.size


def difference_of(path: str, one: Leaf, other: Leaf) -> Difference | None:
    """None when both are the same, bit by bit; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensor_difference(path, one, other)
    if isinstance(one, (Digest, torch.Tensor)) or isinstance(other, (Digest, torch.Tensor)):
        alike = type(one) is type(other) and one == other
        return None if alike else Difference(path=path, nature=Nature.NUMBER, size=None)
    if isinstance(one, float) and isinstance(other, float):
        return _number_difference(path, one, other)
    if type(one) is type(other) and one == other:
        return None
    size = abs(float(one) - float(other)) if _is_count(one) and _is_count(other) else None  # type: ignore[arg-type]
    return Difference(path=path, nature=Nature.EXACT, size=size)


def _tensor_difference(path: str, one: torch.Tensor, other: torch.Tensor) -> Difference | None:
    if one.dtype != other.dtype or one.shape != other.shape:
        return Difference(path=path, nature=Nature.EXACT, size=None)
    if torch.equal(_bytes(one), _bytes(other)):
        return None
    nature = Nature.NUMBER if one.is_floating_point() or one.is_complex() else Nature.EXACT
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - other.to(wide)).abs()
    size = float(apart.max())
    return Difference(path=path, nature=nature, size=size if math.isfinite(size) else None)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


def _number_difference(path: str, one: float, other: float) -> Difference | None:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return None
    size = abs(one - other)
    return Difference(path=path, nature=Nature.NUMBER, size=size if math.isfinite(size) else None)


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
