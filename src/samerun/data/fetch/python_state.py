"""Python's global generator, saved and put back in a microsecond.

`random.getstate()` makes 625 integers of the 624 words, which takes longer than reading a small sample. CPython keeps
an index and the words in a row behind the object's head, so they are copied as bytes. The layout is checked against
`getstate()` when it is first used; where it differs (another interpreter), the slow way is taken. The cached half of
a pair of normal draws is an attribute and kept as such.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from typing import Any, Final

_global: Final[Any] = random._inst
"""Whose methods the functions of the module are."""
_WORDS: Final = 624
_BYTES: Final = 4 * (_WORDS + 1)
"""The index, a C int, and the state's words."""


class PythonState:
    """The state at construction; `put_back` restores it, whatever was drawn or seeded in between."""

    __slots__ = ("_half", "_slow", "_words")

    def __init__(self) -> None:
        self._slow: Any = None
        if not _layout_is_known():
            self._slow = random.getstate()
            return
        self._words = _memory().raw
        self._half = _global.gauss_next

    def put_back(self) -> None:
        if self._slow is not None:
            random.setstate(self._slow)
            return
        _memory().raw = self._words
        _global.gauss_next = self._half


@functools.cache
def _memory() -> Any:
    """The index and the words where they lie: a view, read and written by its `raw`."""
    return (ctypes.c_char * _BYTES).from_address(id(_global) + object.__basicsize__)


@functools.cache
def _layout_is_known() -> bool:
    return _check_layout()


def _check_layout() -> bool:
    """Both ways round: what is read is the state, and what is written becomes it."""
    if sys.implementation.name != "cpython" or type(_global) is not random.Random:
        return False  # an id is an address in CPython only
    if type(_global).__basicsize__ < object.__basicsize__ + _BYTES:
        return False
    before = random.getstate()
    index, *words = memoryview(_memory().raw).cast("I")
    if (*words, index) != before[1]:
        return False
    random.random()
    _memory().raw = bytes((ctypes.c_uint32 * (_WORDS + 1))(index, *words))
    written = random.getstate() == before
    random.setstate(before)
    return written
