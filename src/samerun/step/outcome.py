"""What became of a window."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
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
    """Global L2 norm of the unscaled gradient of the objective, before clipping."""
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
