"""How ranks are arranged: N = D · TP · PP · CP, for a regular mesh with distinct axes.

Context-parallel ranks split one sample's sequence, so they are not replicas. The product does not describe overlapping
expert-parallel or hybrid groups; those are refused, and state D themselves.
Source: Megatron-LM (arXiv 2104.04473) §3; PyTorch DeviceMesh.
"""

from __future__ import annotations

from dataclasses import dataclass

from samerun.errors import UsageError
from samerun.plan import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`num_ranks` devices as data (D) × tensor × pipeline × context ranks. UsageError when they do not divide."""

    num_ranks: int = 1
    num_tensor: int = 1
    num_pipeline: int = 1
    num_context: int = 1

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_tensor", "num_pipeline", "num_context"):
            checks.whole(name, getattr(self, name), "8")
        if self.num_ranks % self.ranks_per_replica:
            ranks, each = self.num_ranks, self.ranks_per_replica
            near = max(each, ranks // each * each)
            raise UsageError(
                f"{ranks} ranks cannot form whole replicas of TP {self.num_tensor} × PP {self.num_pipeline} × "
                f"CP {self.num_context} = {each} ranks; the nearest mesh has {near} ranks ({near // each} × DP)"
            )

    @property
    def ranks_per_replica(self) -> int:
        return self.num_tensor * self.num_pipeline * self.num_context

    @property
    def num_replicas(self) -> int:
        """D: independent data-parallel copies."""
        return self.num_ranks // self.ranks_per_replica

    def __str__(self) -> str:
        parts = [f"DP {self.num_replicas}"]
        for name, value in (("TP", self.num_tensor), ("PP", self.num_pipeline), ("CP", self.num_context)):
            if value > 1:
                parts.append(f"{name} {value}")
        return " × ".join(parts)


def refuse_overlapping(*, num_expert: int = 1, is_hybrid: bool = False) -> None:
    """Raises UsageError: D = N/(TP·PP·CP) is wrong for expert-parallel or hybrid groups that share ranks."""
    if num_expert > 1 or is_hybrid:
        what = f"expert parallelism of {num_expert}" if num_expert > 1 else "hybrid groups"
        raise UsageError(
            f"D = ranks / (TP·PP·CP) does not describe {what}: these groups share ranks with other axes. "
            "State the number of replicas yourself: --replicas 4"
        )
