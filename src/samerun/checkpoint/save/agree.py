"""Work that every rank does and whose failure every rank learns of, so that all of them raise, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from samerun.errors import (
    AlreadyExistsError,
    DamagedError,
    FencedError,
    MismatchError,
    NotFoundError,
    PeerError,
    SamerunError,
    SchemaError,
    StorageError,
    TornCopyError,
    UsageError,
)

if TYPE_CHECKING:
    from samerun.ranks.group import Group

_STORAGE: Final = {kind.__name__: kind for kind in (StorageError, NotFoundError, AlreadyExistsError)}
_PLAIN: Final = {
    kind.__name__: kind
    for kind in (UsageError, DamagedError, SchemaError, MismatchError, FencedError, PeerError, TornCopyError)
}


def all_ranks(group: Group, work: Callable[[], Any], *, seconds: float | None = None) -> list[Any]:
    """Runs `work` on every rank; returns every rank's JSON value, in rank order.

    If it failed anywhere, every rank raises the first failing rank's error (its class and message, naming the rank).
    An error that is no SamerunError is raised as it is where it happened and as PeerError elsewhere.
    """
    value, failure = None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001  # it must reach the peers before it is raised
        failure = error
    reports = group.gather({"value": value, "error": _described(failure)}, seconds=seconds)
    if failure is not None and not isinstance(failure, SamerunError):
        raise failure
    for rank, report in enumerate(reports):
        if report["error"] is not None:
            if failure is not None and rank == group.rank:
                raise failure
            raise _rebuilt(report["error"], rank) from failure
    return [report["value"] for report in reports]


def one_rank(group: Group, work: Callable[[], Any], *, seconds: float | None = None) -> Any:
    """Runs `work` on rank 0; every rank returns its JSON value, or raises its error."""
    return all_ranks(group, work if group.rank == 0 else _nothing, seconds=seconds)[0]


def _nothing() -> None:
    return None


def _described(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    described: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, StorageError):
        described |= {"errno": error.errno, "text": error.strerror, "where": error.filename}
    return described


def _rebuilt(error: dict[str, Any], rank: int) -> SamerunError:
    text = f"rank {rank}: {error['text']}"
    if error["kind"] in _STORAGE:
        return _STORAGE[error["kind"]](error["errno"], text, error["where"])
    if error["kind"] in _PLAIN:
        return _PLAIN[error["kind"]](text)
    return PeerError(f"rank {rank} failed: {error['kind']}: {error['text']}")
