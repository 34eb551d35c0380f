"""A detector that fails must never cost a training: it is named and switched off, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Guard:
    """`call(name, …)` runs a detector; after its first exception it is off, and `problems` says why."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.problems: dict[str, str] = {}

    def is_on(self, name: str) -> bool:
        return name not in self.problems

    def call(self, name: str, detector: Callable[..., T], *args: Any, default: T, **values: Any) -> T:
        """The detector's answer, or `default` once it is off."""
        if name in self.problems:
            return default
        try:
            return detector(*args, **values)
        except Exception as error:  # noqa: BLE001  # whatever it is, the training is worth more than the detector
            self.problems[name] = repr(error)
            self._tell(f"health: the detector {name!r} failed and is switched off: {error!r}")
            return default
