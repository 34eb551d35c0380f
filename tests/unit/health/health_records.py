"""A window's record with everything ordinary but what a test says."""

from __future__ import annotations

from typing import Any

from samerun.health.records.event import WindowRecord


def record(**changed: Any) -> WindowRecord:
    values: dict[str, Any] = {
        "window": 13, "start": 91, "end": 98, "coverage": 2**63 + 7, "samples": 7, "tokens": 1001,
        "loss": 2.25, "grad_norm": 0.5, "lr": 3e-4, "scale": 1.0, "outcome": "updated", "window_seconds": 0.5,
        "compute_seconds": 0.3, "wait_seconds": 0.15, "data_seconds": 0.05, "memory_bytes": 2**33,
    }  # fmt: skip
    return WindowRecord(**{**values, **changed})
