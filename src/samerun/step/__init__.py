"""One window: the safe update, in the one right order. Draws nothing, stores nothing, decides alike on every rank.

Public: `Step` for people who keep their own loop, and the modules `schedule` (learning rates on a named clock),
`recompute` (activation checkpointing), `noise` (gradient noise scale). Loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Step": "samerun.step.loop",
    "Outcome": "samerun.step.outcome",
    "Reason": "samerun.step.outcome",
    "SkipRate": "samerun.step.skip_rate",
}
_MODULES = ("schedule", "recompute", "noise")

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"samerun.step.{name}")
    raise AttributeError(f"module 'samerun.step' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
