"""The checkpoint store: save, find, verify and load; nothing here trusts a byte that it has not checked."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Catalog, Entry, Rejected
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.checkpoint.save.pending import Pending
    from samerun.checkpoint.store import Store
    from samerun.checkpoint.tensors import Slices

_HOME = {
    "Catalog": "samerun.checkpoint.catalog",
    "Checkpoint": "samerun.checkpoint.load.opened",
    "Entry": "samerun.checkpoint.catalog",
    "Pending": "samerun.checkpoint.save.pending",
    "Rejected": "samerun.checkpoint.catalog",
    "Slices": "samerun.checkpoint.tensors",
    "Store": "samerun.checkpoint.store",
}

__all__ = ["Catalog", "Checkpoint", "Entry", "Pending", "Rejected", "Slices", "Store"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'samerun.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
