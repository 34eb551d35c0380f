"""From a stream's saved state to the place where it continues: checks, decision, and what must be read again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from samerun.data.adapters.marks import Mark
from samerun.data.elastic import Decision, Policy, Share, accepted, decide
from samerun.data.source import Guarantee, Replica
from samerun.errors import UsageError

SCHEMA: Final = "ckpt.stream.v1"
_MAX_COUNT: Final = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    windows: int
    mark: Mark
    after: int
    """Items to read and drop from `mark` on."""
    decision: Decision


def stream_state(*, windows: int, mark: Mark, after: int, share: Share, replica: Replica) -> dict[str, Any]:
    """The inverse of `resumed`, as JSON."""
    return {
        "schema": SCHEMA,
        "unit": "microbatch",
        "guarantee": share.guarantee.label,
        "windows": windows,
        "epoch": mark.epoch,
        "item": mark.item,
        "snapshot": mark.snapshot,
        "after": after,
        "replica": [0, 1] if share.shared else [replica.index, replica.count],
        "identity": share.identity,
    }


def resumed(state: Any, now: Share, *, replica: Replica, allowed: Collection[Policy]) -> Resumed:
    """Where the stream continues. Raises UsageError for a foreign or damaged state, or a decision to refuse."""
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        found = state.get("schema") if isinstance(state, dict) else type(state).__name__
        raise UsageError(f"the data state has schema {found!r}, this source reads {SCHEMA!r}")
    windows, epoch, item, after = (_count(state, name) for name in ("windows", "epoch", "item", "after"))
    index, count = _replica(state)
    identity = state.get("identity")
    if not isinstance(identity, dict):
        raise UsageError(f"the stream's state has identity={identity!r}, expected an object")
    saved = Share(
        guarantee=next((g for g in Guarantee if g.label == state.get("guarantee")), Guarantee.BEST_EFFORT),
        replicas=count,
        shared=bool(identity.get("shared")),
        even=_count(identity, "microbatches_per_window") % count == 0,
        identity=identity,
    )
    if not saved.shared and count == replica.count and index != replica.index:
        raise UsageError(
            f"replica {replica.index} was given the position of replica {index} of {count}; each replica's own stream "
            "continues from its own state"
        )
    mark = Mark(epoch=epoch, item=item, snapshot=state.get("snapshot"))
    if now.guarantee is Guarantee.BEST_EFFORT:
        mark, after = Mark(epoch=0, item=0), 0
    if saved.shared and now.shared:
        saved = replace(saved, replicas=now.replicas)  # one stream for all: how many shared it does not matter
    position = (item + after) * (1 if now.shared else count)
    decision = accepted(decide(saved, now, position=position, allowed=allowed, consumed=after))
    if decision.policy in (Policy.AT_LEAST_ONCE, Policy.AT_MOST_ONCE):
        mark, after = Mark(epoch=epoch, item=0), decision.position // now.replicas
    return Resumed(windows=windows, mark=mark, after=after, decision=decision)


def _count(state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise UsageError(f"the stream's state has {name}={value!r}, expected a whole number from 0 to {_MAX_COUNT}")
    return value


def _replica(state: dict[str, Any]) -> tuple[int, int]:
    match state.get("replica"):
        case [int(index), int(count)] if 0 <= index < count:
            return index, count
        case other:
            raise UsageError(f"the stream's state has replica={other!r}, expected [index, count]")
