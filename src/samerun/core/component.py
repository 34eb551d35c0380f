"""What one part of a run's state looks like, so that state, data and checkpoint agree without importing each other.

A component captures itself as plain values and tensors, and restores itself from a source that proves what it gives.
COMPONENTS is the one list of names, in the order of restoring: `rng` last, since restoring anything else may draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import torch

Plain = (
    None | bool | int | float | str | bytes
    | list["Plain"] | tuple["Plain", ...] | dict[str | int, "Plain"] | Counter[str | int]
)  # fmt: skip
"""What plain state may be made of. Anything else is refused by component path when it is saved."""

COMPONENTS: Final = (
    "weights", "buffers", "moments", "steps", "scheduler", "scaler", "cursor", "samples", "loss", "ema", "rng",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One component at one edge. Tensors are live references: the store copies them before it returns.

    `tensors`: equal on every rank (replicated under DDP) or DTensors, each chunk of which is stored once.
    `rank_tensors`: this rank's own; stored per rank unless every rank turns out to hold the same bytes.
    `plain`: this rank's own plain values; likewise.
    Keys are the component's own names (`h.0.attn.weight`); the store prefixes the component.
    """

    plain: Plain = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rank_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a checkpoint says about a tensor before any of its bytes are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """One component of one checkpoint, as this rank may read it. What is not consumed is an error afterwards."""

    @property
    def plain(self) -> Plain:
        """This rank's plain values; on another world size rank 0's, when all ranks had the same."""

    @property
    def plain_per_rank(self) -> list[Plain] | None:
        """Every saved rank's plain values where they differed, else None. Reads the other indexes."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Key → global dtype and shape of every tensor of this component that this rank may read."""

    def of_first_rank(self) -> Source:
        """The same, with what rank 0 held of tensors that differed, for a run on another number of ranks."""

    def read_into(self, key: str, target: torch.Tensor) -> None:
        """Fills `target` (plain or DTensor, any device) with verified bytes, every element exactly once.

        Raises MismatchError on another dtype, shape or incomplete coverage, DamagedError on bad bytes.
        """


class Component(Protocol):
    """One part of the state of a run. `name` is one of COMPONENTS or the user's own."""

    @property
    def name(self) -> str: ...

    def capture(self) -> Captured: ...

    def restore(self, source: Source) -> None: ...
