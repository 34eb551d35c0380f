"""The checkpoint store: save, find, verify and load; nothing here trusts a byte that it has not checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samerun.core.lazy import lazy_names

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Catalog, Entry, Rejected
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.checkpoint.save.pending import Pending
    from samerun.checkpoint.store import Store
    from samerun.checkpoint.tensors import Slices

__all__ = ["Catalog", "Checkpoint", "Entry", "Pending", "Rejected", "Slices", "Store"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Catalog": "catalog",
        "Checkpoint": "load.opened",
        "Entry": "catalog",
        "Pending": "save.pending",
        "Rejected": "catalog",
        "Slices": "tensors",
        "Store": "store",
    },
)
