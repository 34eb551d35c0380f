"""samerun: a PyTorch training run that stops comes back as the same run, and you can prove it.

Names are loaded on first use, so importing this package has no effects and costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samerun.data import Data
    from samerun.run import Run, warm_start
    from samerun.state.rng import seed_all

_HOME = {
    "Data": "samerun.data",
    "Run": "samerun.run",
    "seed_all": "samerun.state.rng",
    "warm_start": "samerun.run",
}

_PARTS = ("checkpoint", "data", "dcp", "health", "plan", "preempt", "step")
"""Folders that are of use on their own: `samerun.plan`, `samerun.checkpoint.Store`, …"""

__all__ = ["Data", "Run", "checkpoint", "data", "dcp", "health", "plan", "preempt", "seed_all", "step", "warm_start"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"samerun.{name}")
    raise AttributeError(f"module 'samerun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
