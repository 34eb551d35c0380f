"""Every request to an object store, one method each, so that they can be counted and made to fail.

Each tells `before` what it is about to ask and `after` that the answer is on its way: a subclass that raises in
`before` refuses the request, one that raises in `after` loses the answer of a request that was carried out. Errors are
obstore's own; `cloud` gives them their meaning.

A `mark` is a word of the writer's own that travels as the object's metadata: whoever reads the object back knows whose
write it was, also when two writers wrote the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, cast

import obstore

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_MARK: Final = "samerunwriter"
"""One lower-case word: the only form of a metadata name that S3, GCS and Azure all keep as it is."""


class Verb(Enum):
    CREATE = "create"
    REPLACE = "replace"
    OVERWRITE = "overwrite"
    UPLOAD = "upload"
    READ = "read"
    LOOK = "look"
    READ_RANGE = "read range"
    LIST = "list"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    verb: Verb
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An object as the store describes it. `data` is None where it was not asked for, or larger than wanted."""

    size_bytes: int
    version: dict[str, str]
    mark: str | None
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    key: str
    size_bytes: int
    modified: datetime


class Requests:
    """Requests to one bucket (or container) and prefix. Blocking, and safe to call from several threads."""

    def __init__(self, store: ObjectStore, *, part_bytes: int = 8 * 2**20, max_concurrency: int = 4) -> None:
        self._store = store
        self._part_bytes = part_bytes
        self._max_concurrency = max_concurrency

    def before(self, request: Request) -> None:
        """Called before every request; may raise instead of it."""

    def after(self, request: Request) -> None:
        """Called once a request was carried out; may raise in place of its answer."""

    def create(self, key: str, data: bytes, mark: str) -> None:
        """One conditional request: obstore's AlreadyExistsError when the key exists."""
        with self._asked(Verb.CREATE, key):
            obstore.put(self._store, key, data, mode="create", attributes=_attributes(mark))

    def replace(self, key: str, data: bytes, mark: str, version: Mapping[str, str]) -> None:
        """One conditional request: obstore's PreconditionError when the key is not at `version` any more."""
        with self._asked(Verb.REPLACE, key):
            obstore.put(self._store, key, data, mode=cast("Any", dict(version)), attributes=_attributes(mark))

    def overwrite(self, key: str, data: bytes) -> None:
        with self._asked(Verb.OVERWRITE, key):
            obstore.put(self._store, key, data, mode="overwrite", use_multipart=False)

    def upload(self, key: str, parts: Iterable[bytes], mark: str) -> None:
        """A multipart upload of everything that `parts` yields. One that fails, or that `parts` ends by an error, is
        aborted: nothing of it becomes visible, and its parts are taken away if the store can be reached."""
        with self._asked(Verb.UPLOAD, key):
            obstore.put(
                self._store,
                key,
                parts,
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=self._max_concurrency,
                attributes=_attributes(mark),
            )

    def read(self, key: str, *, max_bytes: int) -> Held:
        with self._asked(Verb.READ, key):
            result = obstore.get(self._store, key)
            data = bytes(result.bytes()) if result.meta["size"] <= max_bytes else None
            return _held(result, data)

    def look(self, key: str) -> Held:
        with self._asked(Verb.LOOK, key):
            return _held(obstore.get(self._store, key, options={"head": True}), None)

    def read_range(self, key: str, start: int, num_bytes: int) -> memoryview:
        """At most `num_bytes` from byte `start`; fewer when the object ends first."""
        with self._asked(Verb.READ_RANGE, key):
            return memoryview(obstore.get_range(self._store, key, start=start, length=num_bytes))

    def list_level(self, prefix: str) -> list[str]:
        """The keys and prefixes directly under `prefix`."""
        with self._asked(Verb.LIST, prefix):
            found = obstore.list_with_delimiter(self._store, prefix=prefix or None)
            return [*found["common_prefixes"], *(item["path"] for item in found["objects"])]

    def list_all(self, prefix: str) -> list[Listed]:
        """Every object below `prefix`, at any depth."""
        with self._asked(Verb.LIST, prefix):
            found = obstore.list(self._store, prefix=prefix or None).collect()
            return [Listed(key=item["path"], size_bytes=item["size"], modified=item["last_modified"]) for item in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects in bulk. Some stores raise FileNotFoundError for one that is gone, others say nothing."""
        with self._asked(Verb.DELETE, keys[0]):
            obstore.delete(self._store, keys)

    @contextmanager
    def _asked(self, verb: Verb, key: str) -> Iterator[None]:
        request = Request(verb=verb, key=key)
        self.before(request)
        yield
        self.after(request)


def _attributes(mark: str) -> Any:
    return {_MARK: mark}


def _held(result: obstore.GetResult, data: bytes | None) -> Held:
    meta = result.meta
    named = (("e_tag", meta["e_tag"]), ("version", meta["version"]))
    mark = cast("Mapping[str, Any]", result.attributes).get(_MARK)
    return Held(
        size_bytes=meta["size"],
        version={name: value for name, value in named if value is not None},
        mark=None if mark is None else str(mark),
        data=data,
    )
