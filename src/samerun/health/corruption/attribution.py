"""Tier 2: whose fault a rejected value is, from replays in place. Classification is pure; `replay` is the executor.

    1 in place, same rank   differs → transient hardware on the suspect
    2 on a peer rank        the majority differs from the suspect → persistent hardware on the suspect
    3 all agree             the value is the right one for these inputs: another microbatch on the suspect is fine
                            → data at this position; it fails too → state is corrupt, or the model unstable
    otherwise               unresolved: a vote without majority, kernels that vary

A verdict against hardware takes two independent confirmations before anything is excluded for it; one is a suspicion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from samerun.ranks.group import Group

CONFIRMATIONS: Final = 2


class Blame(Enum):
    TRANSIENT_HARDWARE = "transient hardware"
    PERSISTENT_HARDWARE = "persistent hardware"
    DATA = "data at this position"
    STATE = "corrupt state"
    MODEL = "unstable model"
    UNRESOLVED = "unresolved"

    @property
    def is_hardware(self) -> bool:
        return self in (Blame.TRANSIENT_HARDWARE, Blame.PERSISTENT_HARDWARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the replays showed; digests are of loss, local gradients and buffers."""

    suspect: int
    original: str
    replayed: str
    """The same microbatch on the suspect once more."""
    peers: tuple[str, ...]
    """The suspect's microbatch on each other rank; empty where it could not be run elsewhere."""
    kernels_are_deterministic: bool
    other_microbatch_is_good: bool | None = None
    """A microbatch known to be good, on the suspect; None: not tried."""
    state_differs_from_peers: bool | None = None
    """Whether tier 0 finds the suspect's state unlike its replicas'; None: nothing to compare with."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def classify(evidence: Evidence) -> Blame:
    """The first test that decides, in the order of the table above."""
    if evidence.state_differs_from_peers:
        return Blame.STATE
    if evidence.replayed != evidence.original:
        return Blame.TRANSIENT_HARDWARE if evidence.kernels_are_deterministic else Blame.UNRESOLVED
    if evidence.peers:
        votes = Counter([evidence.replayed, *evidence.peers])
        winner, count = votes.most_common(1)[0]
        if 2 * count <= sum(votes.values()):
            return Blame.UNRESOLVED
        if winner != evidence.replayed:
            return Blame.PERSISTENT_HARDWARE if evidence.kernels_are_deterministic else Blame.UNRESOLVED
    elif evidence.other_microbatch_is_good is None:
        return Blame.UNRESOLVED
    if evidence.other_microbatch_is_good is None:
        return Blame.UNRESOLVED
    if evidence.other_microbatch_is_good:
        return Blame.DATA
    return Blame.STATE if evidence.state_differs_from_peers is None else Blame.MODEL


def is_confirmed(blames: Sequence[Blame]) -> bool:
    """Whether independent incidents on one device are enough to exclude it."""
    return sum(blame.is_hardware for blame in blames) >= CONFIRMATIONS


def replay(
    group: Group,
    *,
    suspect: int,
    original: str,
    compute: Callable[[], str],
    deterministic: bool,
    other: Callable[[], bool] | None = None,
    state_differs: bool | None = None,
) -> Evidence:
    """Every rank runs `compute`, which computes the *suspect's* microbatch and digests the result. Collective.

    `compute` must leave no trace: random streams, buffers and gradients put back, no gradient sync. `original` is the
    digest of the suspect's first run, and `other` its check of a known-good microbatch; both count on the suspect only.
    """
    own = compute()
    good = other() if other is not None and group.rank == suspect else None
    answers = group.gather([original if group.rank == suspect else None, own, good])
    return Evidence(
        suspect=suspect,
        original=answers[suspect][0],
        replayed=answers[suspect][1],
        peers=tuple(answer[1] for rank, answer in enumerate(answers) if rank != suspect),
        kernels_are_deterministic=deterministic,
        other_microbatch_is_good=answers[suspect][2],
        state_differs_from_peers=state_differs,
    )
