"""Lesson: one file per rank, the manifest last, and every file checked by SHA-256 before any is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from samerun.checkpoint.catalog import Entry
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.tensors import Slices
from samerun.core.component import Captured
from samerun.errors import DamagedError, MismatchError, UsageError
from samerun.format.layout import Box, grid_box, whole
from samerun.lessons.stored import newest, prepare, progress_at, require_sound, store_at, tree_of
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.state.tree import split_tree

OWN: Final = "rank_state"
"""The component that holds what each rank has of its own; global tensors, in slices, are in `SLICED`."""
SLICED: Final = "sharded"


def save_sharded(per_rank_state: Sequence[Mapping[str, Any]], dest_dir: str | Path, step: int) -> Entry:
    """Publishes the states of all ranks as one checkpoint at `dest_dir`: a shard and an index for each, manifest last.

    Each state is a dict of tensors and plain values. A value may be a `samerun.checkpoint.Slices`: this rank's part
    of a global tensor, which other numbers of ranks can load; the parts of all ranks must cover it exactly. All ranks
    are threads of this process here; on real ranks `samerun.checkpoint.Store` does this, with the same files.
    """
    if not per_rank_state:
        raise UsageError("per_rank_state is empty: one state for each rank, at least one")
    progress = progress_at(step)
    prepare(dest_dir)

    def save(rank: ThreadGroup) -> Entry:
        state = per_rank_state[rank.rank]
        sliced: dict[str, Any] = {key: value for key, value in state.items() if isinstance(value, Slices)}
        own = {key: value for key, value in state.items() if key not in sliced}
        plain, tensors = split_tree(own, path="")
        captured = {OWN: Captured(plain=plain, rank_tensors=tensors)}
        if any(isinstance(value, Slices) for each in per_rank_state for value in each.values()):
            captured[SLICED] = Captured(tensors=sliced)
        return store_at(dest_dir, rank).save(captured, progress, facts={}).result()

    return run_ranks(len(per_rank_state), save)[0]


def load_sharded(
    src_dir: str | Path, expected_world_size: int, *, reshard: bool = False
) -> tuple[Entry, list[dict[str, Any]]]:
    """The checkpoint saved last at `src_dir` (or the one that it is), and the state of each rank, in rank order.

    Before anything is loaded every file is read whole and compared with its SHA-256. Raises MismatchError for another
    number of ranks, DamagedError for a wrong digest, a missing or a cut file, SchemaError for an unknown schema, each
    naming the file. A global tensor comes back as this rank's `Slices`; with `reshard=True` it is cut anew along its
    first dimension (the rule of `torch.chunk`) for any `expected_world_size`, and state that was a rank's own, which
    cannot be dealt out, is refused by name.
    """
    storage, entry = newest(src_dir)
    if entry.world_size != expected_world_size and not reshard:
        raise MismatchError(
            f"{entry.name}: world size: {entry.world_size} ranks saved it, {expected_world_size} are to load it; "
            f"resume on {entry.world_size}, or pass reshard=True if all its tensors are global"
        )
    if expected_world_size < 1:
        raise UsageError(f"expected_world_size={expected_world_size}: at least one rank")
    require_sound(storage, entry)
    states = []
    for rank in range(expected_world_size):
        with Checkpoint(storage, entry, rank=rank, size=expected_world_size) as checkpoint:
            states.append(_state(checkpoint, rank, expected_world_size))
    return entry, states


def _state(checkpoint: Checkpoint, rank: int, num_ranks: int) -> dict[str, Any]:
    if OWN not in checkpoint.components:
        raise MismatchError(
            f"{checkpoint.entry.name}: was not written by save_sharded; it holds {', '.join(checkpoint.components)}"
        )
    own = checkpoint.manifest.components[OWN]
    if not checkpoint.same_size and "differ" in (own.plain, own.rank_tensors):
        held = checkpoint.plain(OWN, 0)
        keys = ", ".join(map(str, held)) if isinstance(held, dict) else OWN
        raise MismatchError(
            f"{checkpoint.entry.name}: cannot be dealt out to {num_ranks} ranks: each has its own {keys}; resume on "
            f"{checkpoint.world_size} ranks, or save global tensors as samerun.checkpoint.Slices"
        )
    tree = tree_of(checkpoint, OWN)
    if not isinstance(tree, dict):
        raise DamagedError(f"{checkpoint.entry.name}: {OWN} is a {type(tree).__name__}, not a dict")
    return {**tree, **_sliced(checkpoint, rank, num_ranks)}


def _sliced(checkpoint: Checkpoint, rank: int, num_ranks: int) -> dict[str, Slices]:
    if SLICED not in checkpoint.components:
        return {}
    source, found = checkpoint.source(SLICED), {}
    for key, spec in source.specs.items():
        if checkpoint.same_size:
            chunks = checkpoint.index(rank).chunks.get(SLICED, {}).get(key, ())
            boxes = [Box(chunk.offsets, chunk.lengths) for chunk in chunks]
        elif spec.shape:
            boxes = [grid_box(spec.shape, (num_ranks, *(1,) * (len(spec.shape) - 1)), rank)]
        else:
            boxes = [whole(())]
        parts = {box: torch.empty(box.lengths, dtype=spec.dtype) for box in boxes}
        found[key] = Slices(dtype=spec.dtype, shape=spec.shape, parts=parts)
        source.read_into(key, found[key])
    return found
