"""An option with a few named values: what a person may write, and what an error says when they write another."""

from __future__ import annotations

from enum import Enum
from typing import Self

from samerun.errors import UsageError


class Choice(Enum):
    """Base of the enums that options are given as. The values are the words of the public interface."""

    @classmethod
    def parse(cls, value: str | Self, *, option: str) -> Self:
        """The member itself or the one of this name. Raises UsageError naming the `option` and all choices."""
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in cls)
            raise UsageError(f"{option}={value!r} is unknown; choose one of {known}") from None
