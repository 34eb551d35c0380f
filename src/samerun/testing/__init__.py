"""Contracts as functions: what samerun asks of its own parts, asked of yours, in a test of your own.

Nothing else in the package imports this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samerun.core.lazy import lazy_names

if TYPE_CHECKING:
    from samerun.testing.components import check_component
    from samerun.testing.sources import check_source

__all__ = ["check_component", "check_source"]

__getattr__, __dir__ = lazy_names(__name__, {"check_component": "components", "check_source": "sources"})
