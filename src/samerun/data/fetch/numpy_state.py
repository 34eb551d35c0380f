"""NumPy's global generator, saved and put back in a few microseconds.

`np.random.get_state()` and `set_state()` copy 624 words one by one, about 50 µs each: with no workers that is more than
a small microbatch costs. The words lie in a row behind the address that NumPy publishes (`bit_generator.ctypes`,
meant for exactly such access), so they are copied as bytes. Only the cached half of a pair of normal draws is not
there: it is found by drawing once, which moves the words unless a half was waiting. The layout is checked against
`get_state()` when it is first used; where it differs, the slow way is taken.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import numpy as np

_global: Final[Any] = np.random
"""Untyped: NumPy's stubs leave the two functions out that exchange the global bit generator."""
_WORDS: Final = 624
_BYTES: Final = 4 * (_WORDS + 1)
"""The state's words and the place in them, a C int."""


class NumpyState:
    """The state at construction; `put_back` restores it, whatever was drawn, seeded or exchanged in between."""

    __slots__ = ("_generator", "_half", "_memory", "_slow", "_words")

    def __init__(self) -> None:
        self._generator: Any = _global.get_bit_generator()
        self._slow: Any = None
        self._half: float | None = None
        if type(self._generator) is not np.random.MT19937 or not _layout_is_known():
            self._slow = _global.get_state(legacy=False)
            return
        self._memory = _memory_of(self._generator)
        self._words = self._memory.raw
        drawn = np.random.standard_normal()
        if self._memory.raw == self._words:
            self._half = drawn

    def put_back(self) -> None:
        if _global.get_bit_generator() is not self._generator:
            _global.set_bit_generator(self._generator)
        if self._slow is not None:
            np.random.set_state(self._slow)
        elif self._half is not None:
            words = np.frombuffer(self._words, np.uint32)
            np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), 1, self._half))
        else:
            np.random.seed(0)  # forgets the half of a pair that was drawn meanwhile
            self._memory.raw = self._words


@functools.lru_cache(maxsize=1)
def _memory_of(generator: Any) -> Any:
    """The words and the place in them where they lie: a view, read and written by its `raw`."""
    return (ctypes.c_char * _BYTES).from_address(generator.ctypes.state_address)


@functools.cache
def _layout_is_known() -> bool:
    state: Any = np.random.get_state(legacy=False)
    words = np.frombuffer(_memory_of(_global.get_bit_generator()).raw, np.uint32)
    return np.array_equal(words[:_WORDS], state["state"]["key"]) and int(words[_WORDS]) == state["state"]["pos"]
