"""Sample order, the data cursor, windows and adapters for loaders people have. Loads without torch."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Data": "loader",
    "DataSource": "source",
    "DataWindow": "source",
    "EpochEnd": "windows",
    "Guarantee": "source",
    "MicroBatch": "source",
    "PackedDocuments": "packing",
    "Policy": "elastic",
    "Positions": "cursor",
    "Replica": "source",
    "Stream": "adapters.stream",
    "WindowSampler": "sampler",
    "as_source": "source",
    "audit": "ledger",
    "ledger_line": "ledger",
    "mix64": "coverage",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"samerun.data.{_HOME[name]}"), name)
    raise AttributeError(f"module 'samerun.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
