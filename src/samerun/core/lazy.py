"""Names of a package that are loaded on first use, so that importing it costs nothing and has no effects (PEP 562).

__all__, __getattr__, __dir__ = lazy_names(__name__, {"Store": "store"}, modules=("retention",))
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *, modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """(`__getattr__`, `__dir__`) of `package`: each name from its module below it, and whole `modules`."""

    def load(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listing() -> list[str]:
        return sorted([*homes, *modules])

    return load, listing
