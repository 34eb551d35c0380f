"""How a run steps, said once: what is optimized, in which precision, with which clipping. Part of a run's identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samerun.core.choice import Choice, positive_number, whole_number
from samerun.step.parallel.sync import Accumulate
from samerun.step.precision import Precision


class Objective(Choice):
    """What the window's loss is a mean of. The arithmetic is one, Σ loss / Σ weight; the weights differ."""

    TOKEN_MEAN = "token-mean"
    """Weights are supervised tokens, counted after shifting and masking: each token counts the same."""
    EXAMPLE_MEAN = "example-mean"
    """Losses are sums of per-example means, weights numbers of examples: each example counts the same."""
    MICROBATCH_MEAN = "microbatch-mean"
    """Every microbatch weighs 1, however much it holds. The result depends on how a batch is split."""


class ModelRng(Choice):
    """Where the draws of a forward (dropout) come from."""

    STREAMS = "streams"
    """Each rank's own global streams, saved with the run; derived anew on another number of ranks."""
    BY_POSITION = "by_position"
    """Seeded before each microbatch by (seed, window, number of the microbatch): the same on any number of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    precision: Precision = Precision.FP32
    objective: Objective = Objective.TOKEN_MEAN
    accumulate: Accumulate = Accumulate.SHARDED
    max_norm: float | None = None
    """Clip the global L2 norm of the objective's gradient to this; None switches clipping off."""
    noise_every: int | None = None
    """Measure gradient noise in every so many windows; None: never."""
    rng: ModelRng = ModelRng.STREAMS
    seed: int = 0
    """Only for draws by position."""

    def __post_init__(self) -> None:
        if self.max_norm is not None:  # kept as what JSON can say: it is part of the run's identity
            norm = positive_number(self.max_norm, option="max_norm", instead="None switches clipping off")
            object.__setattr__(self, "max_norm", norm)
        if self.noise_every is not None:
            every = whole_number(
                self.noise_every, option="noise_every", at_least=1, instead="None switches the probe off"
            )
            object.__setattr__(self, "noise_every", every)

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a resumed run to be the same run. The probe changes no number."""
        drawn = {} if self.rng is ModelRng.STREAMS else {"rng": self.rng.value, "seed": self.seed}
        return {
            **drawn,
            "precision": self.precision.value,
            "objective": self.objective.value,
            "accumulate": self.accumulate.value,
            "max_norm": self.max_norm,
        }
