"""Gradient noise measured in the loop: how large a batch would still be useful.

The two-batch estimator of McCandlish et al. (arXiv 1812.06162, appendix A.1; formulas in `samerun.plan.noise`) from
norms that exist anyway: of single microbatches (small) and of the whole window (big, unscaled, before clipping). A
microbatch's gradient is what its backward added to the accumulated one; with unequal token counts n_k the small batch
is their harmonic mean. Under DDP the last microbatch of a window is left out: its backward ends in the mean over
replicas. Under FSDP2, where only shards of the mean over replicas are seen, the microbatches that the replicas run at
the same moment are one small batch: its norm and its tokens take two small reductions in a measured window. Skipped
windows are dropped. Measuring changes no gradient and adds no host synchronisation; a measured window costs one more
copy of the gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from samerun.errors import UsageError
from samerun.plan.noise import noise_interval, noise_trace, squared_gradient
from samerun.ranks.topology import Topology
from samerun.step.outcome import Outcome
from samerun.step.parallel.gradients import squared_norm
from samerun.step.parallel.sync import GradientSync

_NUM_WINDOWS: Final = 1000
"""Measured windows kept: the noise scale grows in training, so old windows say little about now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMeasurement:
    """One measured window: mean squared norm of the microbatches' mean gradients, and that of the window's.

    Batches are in units of the weights (tokens or samples); the small one is the harmonic mean of the microbatches.
    """

    small_squared_norm: float
    big_squared_norm: float
    small_batch: float
    big_batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """B_simple = tr Σ / |G|² in units of the weights (tokens or samples), with its 95 % interval."""

    num_windows: int
    squared_gradient: float
    noise_trace: float
    noise_scale: float | None
    lower: float | None
    upper: float | None

    @property
    def is_identifiable(self) -> bool:
        """False while |G|² cannot be told from zero."""
        return self.noise_scale is not None and self.lower is not None

    def __str__(self) -> str:
        if not self.is_identifiable:
            return f"noise scale not identifiable from {self.num_windows} windows: measure longer, or a larger batch"
        interval = f"95 %: {self.lower:.4g} to {self.upper:.4g}"
        return f"noise scale {self.noise_scale:.4g} ({interval}, {self.num_windows} windows)"


class NoiseProbe:
    """Raises UsageError where single gradients cannot be seen."""

    def __init__(self, every: int, sync: GradientSync, topology: Topology) -> None:
        if sync.forwards_must_match and not sync.reduces_every_backward:
            raise UsageError(
                "noise_every= cannot measure with accumulate='unsharded': FSDP2 keeps what single microbatches add "
                "where nothing can see it until the window's last backward; use accumulate='sharded', or leave it out"
            )
        if sync.at_step:
            raise UsageError("noise_every= measures one optimizer with parameters in full precision; leave it out")
        self._every = every
        self._sync = sync
        self._topology = topology
        self._before: list[torch.Tensor | None] | None = None
        self._sums: torch.Tensor | None = None
        self.last: NoiseMeasurement | None = None
        """Of the window decided last; None when that one was not measured, or skipped."""
        self._gradients: deque[float] = deque(maxlen=_NUM_WINDOWS)
        self._traces: deque[float] = deque(maxlen=_NUM_WINDOWS)

    def begin(self, window: int, device: torch.device) -> None:
        self._before = None
        due = window % self._every == 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=device) if due else None

    def after_backward(
        self, parameters: Sequence[torch.nn.Parameter], weight: torch.Tensor | float, *, last: bool
    ) -> None:
        """Counts one microbatch of `weight` tokens. No host synchronisation; collective where gradients are shards."""
        if self._sums is None or (last and self._sync.reduces_last_backward):
            return
        before = self._before or [None] * len(parameters)
        added = [
            parameter.grad if old is None else parameter.grad - old
            for parameter, old in zip(parameters, before, strict=True)
            if parameter.grad is not None
        ]
        count = torch.as_tensor(weight, dtype=torch.float64, device=self._sums.device).detach()
        squares = squared_norm(added, self._sums.device)
        if self._sync.reduces_every_backward:
            count = count * float(self._topology.counts_tokens)
            dist.all_reduce(count)
            squares = squares * self._topology.num_averaged**2  # of the sum over replicas, not of their mean
        one = torch.stack([squares / count.square(), 1.0 / count, torch.ones_like(count)])
        self._sums = self._sums + torch.where(count > 0, one, torch.zeros_like(one))
        if not last:
            self._before = [None if p.grad is None else p.grad.detach().clone() for p in parameters]

    def share(self) -> torch.Tensor | None:
        """What this rank adds to the sum over ranks; what all of them know alike is added by one."""
        return None if self._sync.reduces_every_backward and self._topology.rank != 0 else self._sums

    def decided(self, outcome: Outcome, sums: Sequence[float], *, backward_scale: float) -> None:
        """Takes the window in, once all ranks' sums are known; `backward_scale` is what each loss was multiplied by."""
        squares, inverse, num = sums
        measured = self._sums is not None and outcome.updated and num > 0
        self._sums, self._before, self.last = None, None, None
        if not measured or not math.isfinite(squares):
            return
        small_batch, big_batch = num / inverse, outcome.weight
        if small_batch >= big_batch:
            return
        small, big = squares / num / backward_scale**2, outcome.grad_norm**2
        self.last = NoiseMeasurement(
            small_squared_norm=small, big_squared_norm=big, small_batch=small_batch, big_batch=big_batch
        )
        self._gradients.append(squared_gradient(small, big, small_batch, big_batch))
        self._traces.append(noise_trace(small, big, small_batch, big_batch))

    def estimate(self) -> NoiseEstimate:
        """From the windows measured so far (the last 1000)."""
        num = len(self._gradients)
        gradient = math.fsum(self._gradients) / num if num else math.nan
        trace = math.fsum(self._traces) / num if num else math.nan
        interval = noise_interval(list(self._gradients), list(self._traces))
        return NoiseEstimate(
            num_windows=num,
            squared_gradient=gradient,
            noise_trace=trace,
            noise_scale=trace / gradient if gradient > 0 else None,
            lower=interval[0] if interval else None,
            upper=interval[1] if interval else None,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"gradients": list(self._gradients), "traces": list(self._traces)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._gradients = deque(state["gradients"], maxlen=_NUM_WINDOWS)
        self._traces = deque(state["traces"], maxlen=_NUM_WINDOWS)
