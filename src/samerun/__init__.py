"""samerun: a PyTorch training run that stops comes back as the same run, and you can prove it.

Names are loaded on first use, so importing this package has no effects and costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Data": "samerun.data",
    "Run": "samerun.run",
    "seed_all": "samerun.state.rng",
    "warm_start": "samerun.run",
}

_PARTS = ("step",)
"""Usable on their own: `samerun.step`."""

__all__ = sorted([*_HOME, *_PARTS])

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"samerun.{name}")
    raise AttributeError(f"module 'samerun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
