"""From other formats to ckpt.v1 and back, running no code of the files: import, read, export.

An import is a beginning (warm start), an export is for use; neither is a run that can be resumed, and both say so.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Form": "samerun.convert.exporting",
    "Foreign": "samerun.convert.sources",
    "export": "samerun.convert.exporting",
    "import_checkpoint": "samerun.convert.importing",
    "read": "samerun.convert.sources",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'samerun.convert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
