"""Restoring nothing by accident: the names in the checkpoint and the names in the program must be the same set."""

from __future__ import annotations

from collections.abc import Iterable

from samerun.errors import MismatchError

_SHOWN = 4


def require_same_names(component: str, *, saved: Iterable[str], live: Iterable[str]) -> None:
    saved_names, live_names = set(saved), set(live)
    if saved_names == live_names:
        return
    parts = []
    if missing := sorted(live_names - saved_names):
        parts.append(f"the checkpoint lacks {_some(missing)}")
    if extra := sorted(saved_names - live_names):
        parts.append(f"the program has no {_some(extra)}")
    raise MismatchError(f"{component}: {'; '.join(parts)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
