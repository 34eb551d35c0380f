"""Tier 0: bitwise checksums of state that replicas must hold alike (parameters and moments under DDP).

Bytes are read as int32 words (int16 or bytes where the size does not divide by four): Σ w and Σ (position + 1)·w, both
mod 2^64. One flipped bit changes the first; a swap of two words changes the second. Tolerance 0: no false alarm but
real divergence. It ends at faults that hit every replica alike, and at changes that happen to keep both sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from samerun.ranks.group import Group

if TYPE_CHECKING:
    import torch

_MASK: Final = (1 << 64) - 1

Checksum = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One tensor that replicas hold differently."""

    name: str
    minority: tuple[int, ...]
    """Ranks whose bytes are not the majority's; every rank where there is no majority."""

    def __str__(self) -> str:
        who = ", ".join(str(rank) for rank in self.minority)
        return f"{self.name}: the bytes of rank {who} differ from those of the others"


def checksum(tensor: torch.Tensor) -> Checksum:
    """Of a tensor's bytes as they lie in row-major order; on its own device."""
    import torch

    from samerun.state.fingerprint import integer_sums

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for dtype in (torch.int32, torch.int16):
        if flat.numel() % dtype.itemsize == 0:
            flat = flat.view(dtype)
            break
    return integer_sums(flat)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, Checksum]:
    """Name → checksum. Sharded tensors are left out: their ranks hold different parts by design."""
    return {name: checksum(tensor) for name, tensor in tensors.items() if not hasattr(tensor, "to_local")}


def compare_replicas(mine: Mapping[str, Checksum], group: Group) -> list[Disagreement]:
    """Which tensors replicas hold differently. Collective; one small gather where all agree, a second one where not."""
    names = sorted(mine)
    digest = [len(names)] + [sum(mine[name][part] * (i + 1) for i, name in enumerate(names)) & _MASK for part in (0, 1)]
    if all(other == digest for other in group.gather(digest)):
        return []
    everyone = group.gather({name: list(mine[name]) for name in names})
    return disagreements([{name: (pair[0], pair[1]) for name, pair in one.items()} for one in everyone])


def disagreements(everyone: Sequence[Mapping[str, Checksum]]) -> list[Disagreement]:
    """By majority vote for each tensor; a tensor that a rank does not have counts as a vote of its own."""
    names = sorted({name for one in everyone for name in one})
    found = []
    for name in names:
        votes = [one.get(name) for one in everyone]
        winner, count = Counter(votes).most_common(1)[0]
        if count == len(votes):
            continue
        is_majority = 2 * count > len(votes)
        minority = [rank for rank, vote in enumerate(votes) if vote != winner or not is_majority]
        found.append(Disagreement(name=name, minority=tuple(minority)))
    return found
