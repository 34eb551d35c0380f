"""Components that are small records of the run itself: the scaler, the cursor, coverage, the loss, evaluations.

A record is plain state behind two functions. Restoring calls the second with exactly what the first returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samerun.core.component import Captured, Source
from samerun.state.tree import join_tree, split_tree


class Record:
    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.name = name
        self._read = read
        self._write = write

    def capture(self) -> Captured:
        plain, tensors = split_tree(self._read(), path="")
        assert not tensors, f"{self.name} is a plain record"
        return Captured(plain=plain)

    def restore(self, source: Source) -> None:
        self._write(join_tree(source.plain, _no_tensors))


def _no_tensors(key: str, host: bool) -> Any:
    raise AssertionError(f"a plain record holds no tensor {key}")
