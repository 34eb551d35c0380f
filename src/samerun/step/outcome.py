"""What became of a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from samerun.core.progress import Progress
from samerun.step.parallel.agree import Agreed


class Reason(Enum):
    """Why a window ended as it did: updated, or what kept it from updating."""

    UPDATED = "updated"
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_GRAD = "non_finite_grad"
    NO_WEIGHT = "no_weight"
    """No supervised token in the whole window: there is nothing to divide by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The same on every rank."""

    reason: Reason
    loss: float
    """The objective over the whole window and all replicas, also when skipped; NaN when any part was not finite."""
    grad_norm: float
    """Global L2 norm of the unscaled gradient of the objective, before clipping; NaN when skipped."""
    grad_norm_clipped: float
    weight: float
    """N: supervised tokens (the weights given to `backward`) over all replicas."""
    lr: float
    """Learning rate of the first parameter group inside this update."""
    scale: float
    """Loss scale during the window; 1 where none is used."""

    @property
    def updated(self) -> bool:
        return self.reason is Reason.UPDATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A closed window: one outcome for each optimizer, by name, and what the ranks agreed with the last of them."""

    outcomes: Mapping[str, Outcome]
    agreed: Agreed
    """Samples, coverage and flags are the window's, whichever optimizer they were agreed with."""

    @property
    def updated(self) -> bool:
        """Whether any parameter may have changed."""
        return any(outcome.updated for outcome in self.outcomes.values())

    @property
    def skipped(self) -> Mapping[str, Outcome]:
        return {name: outcome for name, outcome in self.outcomes.items() if not outcome.updated}

    @property
    def weight(self) -> float:
        """The sum of all weights given to `backward`, over all replicas."""
        return sum(outcome.weight for outcome in self.outcomes.values())

    @property
    def loss(self) -> float:
        """The objective of the optimizer that closed the window."""
        return list(self.outcomes.values())[-1].loss

    def progress_after(self, progress: Progress) -> Progress:
        """The counters once this window is counted."""
        return progress.after(updated=self.updated, samples=self.agreed.num_samples, tokens=round(self.weight))
