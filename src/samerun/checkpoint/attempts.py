"""The run's record and its attempts: who writes here, and who may still write. No torch.

An attempt's number is its fencing epoch: created if absent, so no two writers share one, and never reused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from samerun.errors import AlreadyExistsError, MismatchError, NotFoundError, SchemaError
from samerun.format import names, schema
from samerun.format.sealed import seal, unseal

if TYPE_CHECKING:
    from samerun.storage.api import Storage

_NO_RUN: Final = (
    "weights for use: optimizer memory, counters, cursor and random streams of a run are not there, so nothing can be "
    "resumed from it. Begin a new run at another path, with samerun.warm_start for the weights (an export: `samerun "
    "import` first)"
)


def newest_attempt(storage: Storage) -> int:
    """The largest attempt number there is; 0 when none has started."""
    numbers = (names.attempt_number(name) for name in storage.names(names.ATTEMPTS))
    return max((number for number in numbers if number is not None), default=0)


def open_attempt(storage: Storage, facts: dict[str, Any]) -> int:
    """Takes the next free number, against any number of competitors."""
    while True:
        number = newest_attempt(storage) + 1
        document = {"schema": schema.ATTEMPT_SCHEMA, "attempt": number, "facts": facts}
        try:
            storage.put_if_absent(names.attempt_key(number), seal(document))
        except AlreadyExistsError:
            continue  # someone else took it; the next look sees theirs
        return number


def read_run(storage: Storage) -> dict[str, Any] | None:
    """The run's record; None when nothing was ever written. SchemaError when the path holds something else,
    MismatchError when it holds weights that were exported or imported.
    """
    try:
        data = storage.get(names.RUN_FILE, max_bytes=schema.MAX_SMALL_DOCUMENT_BYTES).data
    except NotFoundError:
        if any(names.is_checkpoint_name(name) for name in storage.names(names.CHECKPOINTS)):
            raise SchemaError(
                f"{storage.where}: holds checkpoints but no {names.RUN_FILE}; put it back, or use a new path"
            ) from None
        if names.EXPORT_FILE in storage.names(""):
            raise MismatchError(f"{storage.where}: is an export, {_NO_RUN}") from None
        return None
    where = f"{storage.where}/{names.RUN_FILE}"
    found = _facts(unseal(data, schema=schema.RUN_SCHEMA, where=where), "run", where)
    if found.get("kind") == "import":
        raise MismatchError(f"{storage.where}: holds an import, {_NO_RUN}")
    return found


def write_run(storage: Storage, run: dict[str, Any]) -> None:
    storage.put_if_absent(names.RUN_FILE, seal({"schema": schema.RUN_SCHEMA, "run": run}))


def _facts(tree: dict[str, Any], field: str, where: str) -> dict[str, Any]:
    found = tree.get(field)
    if not isinstance(found, dict):
        raise SchemaError(f"{where}: has no object {field!r}")
    return found
