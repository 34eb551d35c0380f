"""The gradient noise scale from measured gradient norms: how large a batch is still useful.

McCandlish et al. (arXiv 1812.06162, appendix A.1). From squared norms at two batch sizes,

    |G|²  = (B_b·|g_b|² − B_s·|g_s|²) / (B_b − B_s)
    tr Σ  = (|g_s|² − |g_b|²) / (1/B_s − 1/B_b)
    B_simple = tr Σ / |G|²           both unbiased; the ratio is taken of means, never a mean of ratios

At batch B a step is worth 1/(1 + B_simple/B) of a noiseless one; steps are S = S_min·(1 + B_n/B) and samples
E = E_min·(1 + B/B_n): at B = B_n both are twice their minimum.

Windows that were skipped are left out, norms are those after unscaling and before clipping, and the interval comes
from a delete-one-block jackknife. When the interval of |G|² contains zero the noise scale is not identifiable:
measure longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final

from samerun.errors import UsageError
from samerun.plan import checks

_NUM_BLOCKS: Final = 20
_T_95: Final[dict[int, float]] = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093,
}  # fmt: skip
"""Two-sided 95 % points of Student's t, by degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Squared gradient norms of one window: of a small batch (mean over replicas) and of the whole batch."""

    small_squared_norm: float
    big_squared_norm: float
    small_batch: float | None = None
    """Of this window, where windows differ (tokens); None: the batch that the whole plan is asked with."""
    big_batch: float | None = None

    def __post_init__(self) -> None:
        checks.not_negative("squared norm of the small batch", self.small_squared_norm, "5.25")
        checks.not_negative("squared norm of the big batch", self.big_squared_norm, "0.5625")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePlan:
    """The estimate with its 95 % interval, and what a batch is worth. Batches in samples (or tokens, as measured)."""

    SCHEMA: ClassVar[str] = "samerun.plan.noise.v1"

    small_batch: float
    big_batch: float
    num_windows: int
    squared_gradient: float
    """|G|²."""
    noise_trace: float
    """tr Σ."""
    noise_scale: float | None
    """None when |G|² is not above zero."""
    lower: float | None
    upper: float | None
    is_identifiable: bool
    efficiency: float | None
    """1/(1 + B_simple/B_b): what a step at the measured big batch is worth of a noiseless one."""


def squared_gradient(small: float, big: float, small_batch: float, big_batch: float) -> float:
    """Unbiased |G|² from two squared norms."""
    return (big_batch * big - small_batch * small) / (big_batch - small_batch)


def noise_trace(small: float, big: float, small_batch: float, big_batch: float) -> float:
    """Unbiased tr Σ from two squared norms."""
    return (small - big) / (1 / small_batch - 1 / big_batch)


def steps_and_samples(batch: float, noise_scale: float) -> tuple[float, float]:
    """(steps over their minimum, samples over their minimum) to a target at this batch: 1 + B_n/B and 1 + B/B_n."""
    return 1 + noise_scale / batch, 1 + batch / noise_scale


def harmonic_batch(token_counts: Sequence[float]) -> float:
    """The small batch when replicas held unequal numbers of tokens: their harmonic mean."""
    if not token_counts or min(token_counts) <= 0:
        raise UsageError("token counts must all be positive; leave out windows in which a replica had none")
    return len(token_counts) / math.fsum(1 / count for count in token_counts)


def plan_noise(
    windows: Sequence[Measured], small_batch: float | None = None, big_batch: float | None = None
) -> NoisePlan:
    """The noise scale of these windows, each with its own batches, or with those given here for all of them.

    Raises UsageError when a window's batches are unknown or not small below big, or no window is given. The plan
    names the windows' mean batches. With batches that differ, |G|² and tr Σ are means of the windows' own estimates.
    """
    if not windows:
        raise UsageError("no measured window; give at least one, 40 or more for an interval")
    batches = [_batches(window, small_batch, big_batch) for window in windows]
    norms = [(window.small_squared_norm, window.big_squared_norm) for window in windows]
    gradients = [squared_gradient(*norm, *batch) for norm, batch in zip(norms, batches, strict=True)]
    traces = [noise_trace(*norm, *batch) for norm, batch in zip(norms, batches, strict=True)]
    gradient, trace = _mean(gradients), _mean(traces)
    scale = trace / gradient if gradient > 0 else None
    interval = noise_interval(gradients, traces)
    is_sure = scale is not None and interval is not None and scale > 0
    big = _mean([batch for _, batch in batches])
    return NoisePlan(
        small_batch=_mean([batch for batch, _ in batches]),
        big_batch=big,
        num_windows=len(windows),
        squared_gradient=gradient,
        noise_trace=trace,
        noise_scale=scale,
        lower=interval[0] if interval else None,
        upper=interval[1] if interval else None,
        is_identifiable=is_sure,
        efficiency=1 / (1 + scale / big) if is_sure and scale is not None else None,
    )


def _batches(window: Measured, small_batch: float | None, big_batch: float | None) -> tuple[float, float]:
    small = window.small_batch if small_batch is None else small_batch
    big = window.big_batch if big_batch is None else big_batch
    if small is None or big is None:
        raise UsageError("the measurements name no batches; give --small 4 --big 64")
    checks.positive("small batch", small, "--small 4")
    checks.positive("big batch", big, "--big 64")
    if small >= big:
        raise UsageError(
            f"two different batches are needed, small below big, got {small:g} and {big:g}; "
            "with one replica use microbatch norms as the small batch"
        )
    return small, big


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def noise_interval(gradients: Sequence[float], traces: Sequence[float]) -> tuple[float, float] | None:
    """95 % of B_simple from a jackknife of log B over windows, each with its own estimates of |G|² and tr Σ.

    None when |G|² may be zero or there are too few windows. Windows may differ in their batches.
    """
    num = min(_NUM_BLOCKS, len(gradients))
    edges = [place * len(gradients) // num for place in range(num + 1)] if num else []
    blocks = list(pairwise(edges))
    if len(blocks) < 2:
        return None
    left_gradients, left_traces = [], []
    for start, end in blocks:
        kept = len(gradients) - (end - start)
        left_gradients.append(math.fsum((*gradients[:start], *gradients[end:])) / kept)
        left_traces.append(math.fsum((*traces[:start], *traces[end:])) / kept)
    mean, spread = _jackknife(left_gradients)
    if mean - _T_95[len(blocks) - 1] * spread <= 0 or min(left_gradients) <= 0 or min(left_traces) <= 0:
        return None
    center, error = _jackknife([math.log(t / g) for t, g in zip(left_traces, left_gradients, strict=True)])
    reach = _T_95[len(blocks) - 1] * error
    return math.exp(center - reach), math.exp(center + reach)


def _jackknife(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error) of leave-one-out estimates."""
    num = len(values)
    mean = math.fsum(values) / num
    return mean, math.sqrt((num - 1) / num * math.fsum((value - mean) ** 2 for value in values))
