"""Who is to blame for a forward that did not come out twice the same, or for a loss that was not finite. Collective.

Every rank calls `look` in the same windows and `rejected` for the same ones, whatever it found itself: what differs
between ranks is in the answers, never in who takes part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from samerun.health.corruption.attribution import Blame, Evidence, classify
from samerun.health.corruption.replaying import Call, Replayer, packed, unpacked

if TYPE_CHECKING:
    import torch

    from samerun.ranks.group import Group

Guarded = Callable[[Callable[[], Any], Any], Any]
"""Runs this rank's own part; the second argument is the answer where that fails, so that every rank goes on."""

_CLEAN_LOOKS: Final = 3
"""After so many looks without a difference the kernels are taken for deterministic, whatever the settings say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whose fault it is, with what it rests on."""

    blame: Blame
    evidence: Evidence

    def to_json(self) -> dict[str, Any]:
        return {"blame": self.blame.value, "evidence": self.evidence.to_json()}

    def __str__(self) -> str:
        suspect = self.evidence.suspect
        return f"{self.blame.value}" + (f", suspect rank {suspect}" if self.blame.is_hardware else f" (rank {suspect})")


class Lookout:
    """One rank's, for an attempt."""

    def __init__(self, replayer: Replayer, group: Group, device: torch.device, *, deterministic: bool) -> None:
        self.replayer = replayer
        self._group = group
        self._device = device
        self._deterministic = deterministic
        self._num_clean = 0
        self._turn = 0

    def look(self, guarded: Guarded) -> Verdict | None:
        """Before the step. None where all agree."""
        replayer, group = self.replayer, self._group
        mine = replayer.call
        again = "" if mine is None else guarded(lambda: replayer.again(mine), "")
        answers = group.gather([replayer.digest, again])
        odd = [rank for rank, (first, second) in enumerate(answers) if first and second and first != second]
        suspect = odd[0] if odd else self._turn % group.size
        self._turn += 1
        peers = self._peers(suspect, guarded)
        first, second = answers[suspect]
        steady = not odd or self._is_steady(suspect, second, guarded)
        made = {rank: value for rank, value in enumerate(peers) if value} | ({suspect: second} if second else {})
        if not odd and len(set(made.values())) <= 1:
            self._num_clean += 1
            return None
        if not odd:  # each repeats itself, so whoever is alone with its answer is the suspect, whosever turn it was
            suspect = _lonely(made, suspect)
            first = second = made[suspect]
        evidence = Evidence(
            suspect=suspect,
            original=first,
            replayed=second,
            peers=tuple(value for rank, value in sorted(made.items()) if rank != suspect),
            kernels_are_deterministic=steady and (self._deterministic or self._num_clean >= _CLEAN_LOOKS),
        )
        return Verdict(blame=classify(evidence), evidence=evidence)

    def rejected(self, guarded: Guarded, calls: Sequence[Call], *, state_is_bad: bool) -> Verdict | None:
        """After a window whose loss was not finite, and which changed nothing. `calls`: this rank's forwards.

        The first rank whose replay fails again is the suspect; where none does it was transient, and nobody is named.
        """
        group = self._group
        replayer = self.replayer
        failing = [n for n, one in enumerate(calls) if guarded(partial(replayer.is_bad, one), False)]
        good = len(failing) < len(calls) if len(calls) > 1 else None  # there must be another one to tell by
        answers = group.gather([bool(failing), good, state_is_bad])
        bad = [rank for rank, answer in enumerate(answers) if answer[0]]
        if not bad:
            return None
        suspect = bad[0]
        mine = guarded(lambda: packed(calls[failing[0]]), None) if group.rank == suspect else None
        sent = group.gather(mine)[suspect]
        verdict = ""
        if sent is not None and group.rank != suspect:
            verdict = guarded(lambda: _word(replayer.is_bad(unpacked(sent, replayer, self._device))), "")
        peers = tuple(one for one in group.gather(verdict) if one)
        evidence = Evidence(
            suspect=suspect,
            original="bad",
            replayed="bad",
            peers=peers,
            kernels_are_deterministic=True,
            other_microbatch_is_good=answers[suspect][1],
            state_differs_from_peers=bool(answers[suspect][2]),
        )
        return Verdict(blame=classify(evidence), evidence=evidence)

    def _peers(self, suspect: int, guarded: Guarded) -> list[str]:
        """What each rank makes of the suspect's microbatch, in rank order; "" for the suspect or if it cannot be."""
        replayer, group = self.replayer, self._group
        if group.size == 1:
            return []
        call = replayer.call
        mine = guarded(lambda: packed(call), None) if group.rank == suspect and call is not None else None
        sent = group.gather(mine)[suspect]
        own = ""
        if sent is not None and group.rank != suspect:
            own = guarded(lambda: replayer.again(unpacked(sent, replayer, self._device)), "")
        return [str(answer) for answer in group.gather(own)]

    def _is_steady(self, suspect: int, second: str, guarded: Guarded) -> bool:
        """Whether a third run on the suspect is like its second: kernels that vary blame nobody."""
        replayer = self.replayer
        third = ""
        if self._group.rank == suspect and replayer.call is not None:
            mine = replayer.call
            third = guarded(lambda: replayer.again(mine), "")
        return bool(self._group.gather(third)[suspect] == second)


def _word(is_bad: bool) -> str:
    return "bad" if is_bad else "good"


def _lonely(made: Mapping[int, str], otherwise: int) -> int:
    """The one rank whose answer is its own, where all the others agree."""
    counts = Counter(made.values())
    alone = [rank for rank, value in made.items() if counts[value] == 1]
    return alone[0] if len(alone) == 1 and len(counts) == 2 else otherwise
