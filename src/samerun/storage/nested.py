"""A storage seen from above: what lies at the root of `inner` appears under `prefix`.

So one checkpoint's directory can be read, written and verified by the code that knows it as a part of a run.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from samerun.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from samerun.storage.api import Found, Reader, Storage, Writer


class Nested:
    """Implements `Storage`: key `prefix/x` is `x` of `inner`; there is nothing else."""

    def __init__(self, inner: Storage, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix

    @property
    def where(self) -> str:
        return self._inner.where

    def make_prefix(self, prefix: str) -> None:
        self._inner.make_prefix(self._below(prefix))

    def writer(self, key: str) -> Writer:
        return self._inner.writer(self._below(key))

    def sync(self, prefix: str) -> None:
        self._inner.sync(self._below(prefix))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._inner.put_if_absent(self._below(key), data)

    def put_if_unchanged(self, key: str, data: bytes, version: str | None, *, durable: bool = True) -> None:
        self._inner.put_if_unchanged(self._below(key), data, version, durable=durable)

    def get(self, key: str, *, max_bytes: int) -> Found:
        return self._inner.get(self._found(key), max_bytes=max_bytes)

    def reader(self, key: str) -> Reader:
        return self._inner.reader(self._found(key))

    def size_bytes(self, key: str) -> int:
        return self._inner.size_bytes(self._found(key))

    def sizes(self, prefix: str, wanted: Iterable[str]) -> dict[str, int]:
        return self._inner.sizes(self._below(prefix), wanted)

    def names(self, prefix: str) -> list[str]:
        if prefix == self._prefix or prefix.startswith(f"{self._prefix}/"):
            return self._inner.names(self._below(prefix))
        above = f"{prefix}/" if prefix else ""
        return [self._prefix[len(above) :].split("/", 1)[0]] if self._prefix.startswith(above) else []

    def remove(self, key: str) -> None:
        self._inner.remove(self._below(key))

    def discard(self, prefix: str, first: str = "") -> None:
        self._inner.discard(self._below(prefix), first)

    def sweep(self) -> int:
        return 0

    def _found(self, key: str) -> str:
        """For reading: outside the prefix there is nothing, which is no misuse. NotFoundError."""
        if not key.startswith(f"{self._prefix}/"):
            raise NotFoundError(errno.ENOENT, f"holds only {self._prefix}, not {key[:80]!r}", self.where)
        return self._below(key)

    def _below(self, key: str) -> str:
        if key == self._prefix:
            return ""
        if not key.startswith(f"{self._prefix}/"):
            raise UsageError(f"{self.where}: holds only {self._prefix}, not {key[:80]!r}")
        return key[len(self._prefix) + 1 :]
