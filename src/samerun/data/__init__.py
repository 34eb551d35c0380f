"""Sample order, the data cursor, windows and adapters for loaders people have. Loads without torch."""

from __future__ import annotations

from samerun.core.lazy import lazy_names

__all__ = [
    "Data",
    "DataSource",
    "DataWindow",
    "EpochEnd",
    "Guarantee",
    "MicroBatch",
    "PackedDocuments",
    "Policy",
    "Positions",
    "Replica",
    "Stream",
    "WindowSampler",
    "as_source",
    "audit",
    "ledger_line",
    "mix64",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
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
    },
)
