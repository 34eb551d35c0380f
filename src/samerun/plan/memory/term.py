"""One term of a memory plan, and the phases of a window in which it is resident.

The peak is a maximum over phases, not a sum over terms: logits are gone when the optimizer steps, and the optimizer's
temporaries do not exist while activations do.

    forward   end of the forward: saved activations and logits are alive
    backward  a segment is recomputed and differentiated: its working set is alive, logits are gone
    step      the optimizer runs: gradients complete, no activations
    save      the state is copied or gathered at an edge: no gradients, no activations
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save"


ALWAYS: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.SAVE)
WINDOW: Final = (Phase.FORWARD, Phase.BACKWARD)


class Tag(Enum):
    """How far a figure can be trusted."""

    EXACT = "exact"
    """The formula counts every element; allocator rounding aside, nothing is left out."""
    BOUND = "bound"
    """Reality lies between the two figures."""
    ESTIMATE = "estimate"
    """Measured elsewhere or a rule of thumb: the upper figure may be passed."""
    UNKNOWN = "unknown"
    """Something needed was not given; the lower figure is all that is certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes on one rank: `lower_bytes` at least; `upper_bytes` at most, None when unknown."""

    name: str
    lower_bytes: int
    upper_bytes: int | None
    tag: Tag
    formula: str
    source: str
    phases: tuple[Phase, ...] = ALWAYS
    """Where it is resident at most (counted in the upper bound)."""
    certain_phases: tuple[Phase, ...] | None = None
    """Where it is resident for sure (counted in the lower bound); None: the same phases."""

    def __post_init__(self) -> None:
        assert self.lower_bytes >= 0, f"{self.name}: negative bytes"
        assert self.upper_bytes is None or self.lower_bytes <= self.upper_bytes, f"{self.name}: bounds out of order"

    def lower_in(self, phase: Phase) -> int:
        sure = self.phases if self.certain_phases is None else self.certain_phases
        return self.lower_bytes if phase in sure else 0

    def upper_in(self, phase: Phase) -> int | None:
        return self.upper_bytes if phase in self.phases else 0


def engineering(number: float) -> str:
    """A count as people say it: 70e9, 6.74e9, 124e6, 4096."""
    if number < 1e5:
        return f"{number:.4g}"
    power = min(12, int(math.log10(number)) // 3 * 3)
    return f"{number / 10**power:.4g}e{power}"
