"""Values that are no tensors: typed JSON on disk, torch.save's bytes only where a stock planner wants to see them.

Stock planners hand out and take bytes that torch.save wrote. The bytes are decoded weights-only (no class is ever
imported, no code run); the bytes given back are built here from verified JSON, so what `torch.load` of a stock planner
unpickles was never on disk.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samerun.checkpoint.load.reading import CARRIERS, read_own
from samerun.checkpoint.tensors import dtype_named
from samerun.core.component import Plain
from samerun.errors import DamagedError, SamerunError, UsageError
from samerun.format.dtypes import ITEM_BYTES
from samerun.state.tree import join_tree, split_tree

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint


def value_of_bytes(data: io.BytesIO, key: str) -> Any:
    """What a planner wrote with torch.save; UsageError naming `key` for anything but plain values and tensors."""
    data.seek(0)
    try:
        return torch.load(data, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds here, and none says which key
        kind = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{key}: cannot be stored without running code to load it ({kind}); put numbers, strings, bytes, lists, "
            f"tuples, dicts and tensors into the state"
        ) from error


def bytes_of_value(value: Any) -> io.BytesIO:
    """`value` as a stock planner expects it."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def split_value(value: Any, key: str) -> tuple[Plain, dict[str, torch.Tensor]]:
    """The plain part of a value and the tensors in it, by key; UsageError naming the path of anything else."""
    return split_tree(value, path=key)


def join_value(checkpoint: Checkpoint, component: str, rank: int, key: str) -> Any:
    """The value `key` as rank `rank` wrote it. DamagedError when it is not there, or not what it must be."""
    where = f"{checkpoint.entry.name}: rank {rank}: {component}/{key}"
    table = checkpoint.plain(component, rank)
    if not isinstance(table, Mapping) or key not in table:
        raise DamagedError(f"{where}: the manifest says this rank wrote it; its index has no such value")
    try:
        return join_tree(table[key], lambda name, _: _own_tensor(checkpoint, component, rank, name))
    except SamerunError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise DamagedError(f"{where}: is not a value that samerun writes ({error})") from error


def _own_tensor(checkpoint: Checkpoint, component: str, rank: int, key: str) -> torch.Tensor:
    where = f"{checkpoint.entry.name}: rank {rank}: {component}/{key}"
    entry = checkpoint.index(rank).rank_tensors.get(component, {}).get(key)
    if entry is None:
        raise DamagedError(f"{where}: a value refers to this tensor, and the index has none")
    array = np.empty(entry.shape, dtype=CARRIERS[ITEM_BYTES[entry.dtype]])
    for box, part in read_own(checkpoint, rank, entry):
        array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))] = part
    return torch.from_numpy(array).view(dtype_named(entry.dtype, where))
