"""What two checkpoints hold differently: components, plain values, tensors and how far they are apart. No torch.

Bounded memory: tensors are compared part by part, in the cut of the first one, whatever the cut of the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samerun.checkpoint.compare.ulps import Distance
from samerun.checkpoint.load.reading import read_own, read_shared
from samerun.checkpoint.save.plan import layout_box
from samerun.format.layout import Box

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.format.schema import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs: where (`component/key`, with `rank N` for a rank's own) and how, in words and numbers."""

    where: str
    what: str
    distance: Distance | None = None


def differences(left: Checkpoint, right: Checkpoint) -> Iterator[Difference]:
    """Everything that differs, component by component, in the order of the names."""
    for component in sorted({*left.components, *right.components}):
        if component not in right.components:
            yield Difference(where=component, what="only in the first")
        elif component not in left.components:
            yield Difference(where=component, what="only in the second")
        else:
            yield from _shared_tensors(left, right, component)
            yield from _per_rank(left, right, component)


def _shared_tensors(left: Checkpoint, right: Checkpoint, component: str) -> Iterator[Difference]:
    ours = left.manifest.components[component].tensors
    theirs = right.manifest.components[component].tensors
    for key in sorted({*ours, *theirs}):
        where = f"{component}/{key}"
        if key not in theirs or key not in ours:
            yield Difference(where=where, what=f"only in the {'first' if key in ours else 'second'}")
        elif (ours[key].dtype, ours[key].shape) != (theirs[key].dtype, theirs[key].shape):
            yield Difference(where=where, what=f"{_kind(ours[key])} against {_kind(theirs[key])}")
        else:
            distance = _compare(left, right, component, key)
            if distance.num_different:
                yield Difference(where=where, what="other values", distance=distance)


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _compare(left: Checkpoint, right: Checkpoint, component: str, key: str) -> Distance:
    distance = Distance()
    entry = left.manifest.components[component].tensors[key]
    layout = left.manifest.layouts[entry.layout]
    for position in range(len(layout.ranks)):
        box = layout_box(layout, entry.shape, position)
        if not box.volume:
            continue
        for part, array in read_shared(left, component, key, box):
            wanted = Box(tuple(map(sum, zip(part.offsets, box.offsets, strict=True))), part.lengths)
            for inner, other in read_shared(right, component, key, wanted):
                at = tuple(slice(o, o + n) for o, n in zip(inner.offsets, inner.lengths, strict=True))
                distance.add(array[at], other, entry.dtype)
    return distance


def _per_rank(left: Checkpoint, right: Checkpoint, component: str) -> Iterator[Difference]:
    """Plain state and ranks' own tensors, rank by rank; once only where all ranks had the same."""
    if left.world_size != right.world_size:
        kinds = (left.manifest.components[component], right.manifest.components[component])
        if any("differ" in (kind.plain, kind.rank_tensors) for kind in kinds):
            what = f"saved per rank, by {left.world_size} and {right.world_size} ranks; not compared"
            yield Difference(where=component, what=what)
            return
    differ = (
        left.manifest.components[component].plain == "differ" or right.manifest.components[component].plain == "differ"
    )
    for rank in range(min(left.world_size, right.world_size)) if differ else [0]:
        prefix = f"{component} (rank {rank})" if differ else component
        for where, what in _plain(left.plain(component, rank), right.plain(component, rank), ""):
            yield Difference(where=f"{prefix}{where}", what=what)
    for rank in range(min(left.world_size, right.world_size)):
        yield from _own_tensors(left, right, component, rank)


def _own_tensors(left: Checkpoint, right: Checkpoint, component: str, rank: int) -> Iterator[Difference]:
    ours = left.index(rank).rank_tensors.get(component, {})
    theirs = right.index(rank).rank_tensors.get(component, {})
    for key in sorted({*ours, *theirs}):
        where = f"{component}/{key} (rank {rank})"
        if key not in theirs or key not in ours:
            yield Difference(where=where, what=f"only in the {'first' if key in ours else 'second'}")
        elif (ours[key].dtype, ours[key].shape) != (theirs[key].dtype, theirs[key].shape):
            yield Difference(where=where, what="another dtype or shape")
        else:
            distance = Distance()
            parts = zip(read_own(left, rank, ours[key]), read_own(right, rank, theirs[key]), strict=True)
            for (_, a), (_, b) in parts:
                distance.add(a, b, ours[key].dtype)
            if distance.num_different:
                yield Difference(where=where, what="other values", distance=distance)


def _plain(left: Any, right: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, how it differs) of every leaf that differs."""
    if type(left) is not type(right):
        yield path, f"{_short(left)} against {_short(right)}"
    elif isinstance(left, dict) and not isinstance(left, Counter):
        for key in [*left, *(key for key in right if key not in left)]:
            here = f"{path}.{key}"
            if key not in right or key not in left:
                yield here, f"only in the {'first' if key in left else 'second'}"
            else:
                yield from _plain(left[key], right[key], here)
    elif isinstance(left, (list, tuple)) and len(left) == len(right):
        for number, (ours, theirs) in enumerate(zip(left, right, strict=True)):
            yield from _plain(ours, theirs, f"{path}[{number}]")
    elif repr(left) != repr(right):  # repr tells -0.0 from 0.0 and finds NaN equal to itself
        yield path, f"{_short(left)} against {_short(right)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
