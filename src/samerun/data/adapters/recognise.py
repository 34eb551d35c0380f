"""What a loader that was handed in is, as far as it shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from samerun.data.source import Guarantee


def guarantee_of(loader: Any, *, replay: bool) -> Guarantee:
    if not replay:
        return Guarantee.BEST_EFFORT
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return Guarantee.SNAPSHOT if stateful and not _drops_a_buffer(loader) else Guarantee.REPLAY


def _drops_a_buffer(loader: Any) -> bool:
    """A Hugging Face iterable with a shuffle buffer: its state leaves the buffer out, so reading again is exact."""
    stages = [getattr(loader, "_ex_iterable", None), getattr(getattr(loader, "dataset", None), "_ex_iterable", None)]
    while stages:
        stage = stages.pop()
        if "BufferShuffled" in type(stage).__name__:
            return True
        if stage is not None:  # several where datasets are interleaved or joined
            stages += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return False


def counter_for(loader: Any) -> Callable[[Any], int]:
    """How many samples one of its batches has, as far as it shows.

    torch's own collate function makes a list of columns from samples that are tuples; every other list is taken for one
    of samples.
    """
    if sys.modules.get("torch") is None:
        return length_of
    from torch.utils.data import default_collate

    return _length_of_columns if getattr(loader, "collate_fn", None) is default_collate else length_of


def _length_of_columns(batch: Any) -> int:
    """Of what torch's default_collate made: tensors, texts side by side, and lists, tuples and dicts of columns."""
    if isinstance(batch, dict):
        return max(map(_length_of_columns, batch.values()), default=1)
    if isinstance(batch, (list, tuple)) and batch:
        return len(batch) if isinstance(batch[0], (str, bytes)) else _length_of_columns(batch[0])
    return length_of(batch)


def length_of(batch: Any) -> int:
    """Samples in a batch: the length of its first sized part that is no text; 1 for anything without a length."""
    if isinstance(batch, dict):
        return max((length_of(value) for value in batch.values()), default=1)
    if isinstance(batch, tuple) and batch:
        return length_of(batch[0])
    if isinstance(batch, (str, bytes)) or not hasattr(batch, "__len__") or getattr(batch, "ndim", 1) == 0:
        return 1
    return len(batch)


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def batches_of(loader: Any) -> int | None:
    """How many batches an epoch has, where the loader says it."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
