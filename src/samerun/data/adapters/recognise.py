"""What a loader that was handed in is, as far as it shows."""

from __future__ import annotations

from typing import Any

from samerun.data.source import Guarantee


def guarantee_of(loader: Any, *, replay: bool) -> Guarantee:
    if not replay:
        return Guarantee.BEST_EFFORT
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return Guarantee.SNAPSHOT if stateful and not _drops_a_buffer(loader) else Guarantee.REPLAY


def _drops_a_buffer(loader: Any) -> bool:
    """A Hugging Face iterable with a shuffle buffer: its state leaves the buffer out, so reading again is exact."""
    stage = getattr(loader, "_ex_iterable", None) or getattr(getattr(loader, "dataset", None), "_ex_iterable", None)
    while stage is not None:
        if "BufferShuffled" in type(stage).__name__:
            return True
        stage = getattr(stage, "ex_iterable", None)
    return False


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
