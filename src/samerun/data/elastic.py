"""What may happen to the data when a run comes back on other ranks, batches or sources: one pure decision.

Decided before the first batch and recorded with its counts. Policies, from the strictest:

    exact          the same samples, each once, in the same windows
    rebatch        the same samples, each once, in the same order; windows are cut anew from the saved position
    replay         the same samples; the source reads n items again and drops them to get there
    at-least-once  nothing is lost, at most n items come again
    at-most-once   nothing comes again, at most n items are lost
    refuse         none of the above can be promised, or is allowed
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from samerun.data.source import Guarantee
from samerun.errors import UsageError


class Policy(Enum):
    """What may happen to the data on a resume; the module says what each one means."""

    EXACT = "exact"
    REBATCH = "rebatch"
    REPLAY = "replay"
    AT_LEAST_ONCE = "at-least-once"
    AT_MOST_ONCE = "at-most-once"
    REFUSE = "refuse"


_REPLAY: Final = re.compile(r"replay\((\d+)\)")

CHANGEABLE: Final = frozenset({"global_batch", "micro_batch"})
"""Parts of an identity whose change keeps the order of samples: what `rebatch` covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How a source was, or will be, read: by how many replicas, and whether they share one stream."""

    guarantee: Guarantee
    replicas: int
    shared: bool
    """All replicas cut their part from one global stream; False: each has a stream of its own."""
    even: bool = True
    """Every replica has read the same number of items, so what was read is a prefix of the dealt items."""
    identity: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided, why, and its bounds in items of the source over all replicas."""

    policy: Policy
    reason: str
    position: int
    """Where reading continues, in the source's unit."""
    replayed: int = 0
    repeated_at_most: int = 0
    lost_at_most: int = 0
    resizes_windows: bool = False
    """A window holds another number of samples from here on; the same cut into other microbatches does not."""

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy.value,
            "reason": self.reason,
            "position": self.position,
            "replayed": self.replayed,
            "repeated_at_most": self.repeated_at_most,
            "lost_at_most": self.lost_at_most,
        }


def decide(saved: Share, now: Share, *, position: int, allowed: Collection[Policy], consumed: int = 0) -> Decision:
    """The strictest policy that holds and is allowed, or `refuse` with the reason.

    `position`: items decided over all replicas. `consumed`: items that a source without its own state has to read
    again. EXACT is always allowed, and so is a replay that the user bounded by building the source.
    """
    changed = sorted(
        k for k in saved.identity.keys() | now.identity.keys() if saved.identity.get(k) != now.identity.get(k)
    )
    described = "; ".join(f"{k} was {saved.identity.get(k)!r} and is now {now.identity.get(k)!r}" for k in changed)
    if set(changed) - CHANGEABLE or saved.guarantee is not now.guarantee or saved.shared != now.shared:
        return _refused(position, f"the data of this run changed: {described or 'another kind of source'}")
    if changed and (saved.identity.get("epoch_end") == "drop_tail" or now.guarantee is not Guarantee.EXACT):
        return _refused(position, f"positions depend on the batch here, so it cannot change: {described}")
    if changed:
        resizes = "global_batch" in changed
        wanted = Decision(policy=Policy.REBATCH, reason=described, position=position, resizes_windows=resizes)
        return _if_allowed(wanted, allowed)
    if saved.replicas != now.replicas and not saved.shared:
        return _redealt(saved, now.replicas, position, allowed)
    if Policy.REFUSE in allowed and (consumed or saved.replicas != now.replicas):
        change = f"{saved.replicas} replicas became {now.replicas}" if saved.replicas != now.replicas else ""
        again = f"{consumed} items would be read again" if consumed else ""
        return _refused(position, f"on_change='refuse': {'; '.join(filter(None, (change, again)))}")
    moved = "" if saved.replicas == now.replicas else f"{saved.replicas} replicas became {now.replicas}; "
    if consumed:
        return Decision(
            policy=Policy.REPLAY,
            reason=f"{moved}the source keeps no state: {consumed} items are read again and dropped",
            position=position,
            replayed=consumed,
        )
    return Decision(policy=Policy.EXACT, reason=f"{moved}every position continues where it was", position=position)


def _redealt(saved: Share, after: int, position: int, allowed: Collection[Policy]) -> Decision:
    """Streams dealt item by item (replica r has items r, r + D, …) restart at one common round of all D' replicas."""
    reason = f"{saved.replicas} streams of their own became {after}"
    if not saved.even:
        return _refused(position, f"{reason}, after the old ones had been read unevenly: what is left has no bound")
    remainder = position % after
    if Policy.AT_LEAST_ONCE in allowed:
        return Decision(
            policy=Policy.AT_LEAST_ONCE,
            reason=f"{reason}; rounded down to a whole round of {after} items",
            position=position - remainder,
            repeated_at_most=remainder,
        )
    if Policy.AT_MOST_ONCE in allowed:
        lost = -position % after
        return Decision(
            policy=Policy.AT_MOST_ONCE,
            reason=f"{reason}; rounded up to a whole round of {after} items",
            position=position + lost,
            lost_at_most=lost,
        )
    return _refused(position, f"{reason}: a replica cannot continue another one's stream")


def _if_allowed(decision: Decision, allowed: Collection[Policy]) -> Decision:
    if decision.policy in allowed:
        return decision
    return _refused(
        decision.position,
        f"{decision.reason}. on_change={decision.policy.value!r} would allow it: each sample still once",
    )


def _refused(position: int, reason: str) -> Decision:
    return Decision(policy=Policy.REFUSE, reason=reason, position=position)


def parse_bounded(text: str | Policy, *, offered: Collection[Policy]) -> tuple[Policy, int | None]:
    """The same with the bound of a `replay(n)`: at most n items may be read again. Raises UsageError."""
    found = _REPLAY.fullmatch(text) if isinstance(text, str) else None
    if found is not None and Policy.REPLAY in offered:
        return Policy.REPLAY, int(found[1])
    return parse_policy(text, offered=offered), None


def parse_policy(text: str | Policy, *, offered: Collection[Policy]) -> Policy:
    """A policy by name; raises UsageError naming those that this source offers."""
    named = {policy.value: policy for policy in offered}
    wanted = text.value if isinstance(text, Policy) else text
    if wanted not in named:
        raise UsageError(f"on_change={wanted!r}; this source offers {sorted(named)}")
    return named[wanted]


def accepted(decision: Decision) -> Decision:
    """The decision itself, or UsageError with its reason if it is to refuse."""
    if decision.policy is Policy.REFUSE:
        raise UsageError(
            f"{decision.reason}. Give the data it was trained on, or start a new run (warm_start) on the new data"
        )
    return decision
