"""How often to save: the time a save takes away against the work a failure takes away.

With P seconds of work between saves, s seconds blocked by a save, D seconds from staged to durable (0 when blocking), a
slow-down φ while it uploads, R seconds to restart, and failures of a Poisson process with mean time M (also during a
restart), the kept share of the wall clock is exactly

    ETTR(P) = P · e^{−(R + D − φD)/M} / ( M · (e^{(P + c)/M} − 1) ),   c = s + φD

which for D = 0 is Daly's (Future Generation Computer Systems 22, 2006, eq. 20). Its optimum does not depend on R and D:

    exact    P* = M · (1 + W₀(−e^{−c/M − 1}))
    Daly     √(2cM) · (1 + √(c/2M)/3 + (c/2M)/9) − c   for c < 2M, else M     (eq. 37)
    Young    √(2cM)                                                           (CACM 17, 1974)

A snapshot counts only when it is durable: with a uniform failure phase the lost work is D + P/2 on average and P + D at
most. One save in flight at a time puts a floor of D under P.

The first-order form [1 − (R + D + P/2)/M] / (1 + c/P) is quoted only below (R + D + P/2)/M = 0.25; the simulation
beside it says how far it is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

from samerun.plan import checks
from samerun.plan.availability.mtbf import FailureRate
from samerun.plan.availability.simulation import Simulated, SimulationRequest, Tier, simulate

FIRST_ORDER_LIMIT: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What one save costs. Blocking: `lag_seconds` 0. Background: blocked while staging, durable later."""

    blocked_seconds: float
    lag_seconds: float = 0.0
    slowdown: float = 0.0
    """Share of speed lost while a save uploads, 0 to 1."""
    restart_seconds: float = 0.0
    """From the failure to the first new work: detection, rescheduling, loading."""
    num_in_flight: int = 1

    def __post_init__(self) -> None:
        checks.not_negative("save time in seconds", self.blocked_seconds, "--save 90s")
        checks.not_negative("lag in seconds", self.lag_seconds, "--lag 8min")
        checks.fraction("slow-down", self.slowdown, "--slowdown 0.05")
        checks.not_negative("restart time in seconds", self.restart_seconds, "--restart 5min")
        checks.whole("saves in flight", self.num_in_flight, "--in-flight 1")
        checks.positive("cost of a save in seconds", self.cost_seconds + self.lag_seconds, "--save 90s")

    @property
    def cost_seconds(self) -> float:
        """c = s + φD: what one save takes from the work."""
        return self.blocked_seconds + self.slowdown * self.lag_seconds

    @property
    def shortest_interval_seconds(self) -> float:
        """D / saves in flight: more often, and saves would pile up."""
        return self.lag_seconds / self.num_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One interval, what it costs and what it keeps; all shares are of the wall clock."""

    interval_seconds: float
    overhead: float
    """c / (P + c): blocked or slowed by saving."""
    loss: float
    """(R + D + P/2) / M, first order: lost to failures."""
    ettr: float
    """The exact share kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """The best interval, the formulas beside each other, and a chosen interval judged."""

    SCHEMA: ClassVar[str] = "samerun.plan.interval.v1"

    saving: Saving
    rate: FailureRate
    young_seconds: float
    daly_seconds: float
    exact_seconds: float
    optimum_seconds: float
    """The exact optimum, or the shortest interval that saves in flight allow."""
    optimum_at_lower_mtbf_seconds: float | None
    optimum_at_upper_mtbf_seconds: float | None
    chosen: Point
    best: Point
    curve: tuple[Point, ...]
    mean_loss_seconds: float
    """Of one failure at the chosen interval: R + D + P/2."""
    largest_loss_seconds: float
    """R + D + P."""
    first_order_ettr: float | None
    """None outside its range."""
    simulated: Simulated
    warnings: tuple[str, ...]


def lambert_w0(x: float) -> float:
    """The principal branch on [−1/e, 0], by Halley's iteration from the branch-point series."""
    if x <= -1 / math.e:
        return -1.0
    root = math.sqrt(2 * (math.e * x + 1))
    w = -1 + root - root**2 / 3 + 11 * root**3 / 72 if x < -0.2 else x * (1 - x)
    for _ in range(50):
        power = math.exp(w)
        error = w * power - x
        if error == 0 or w == -1:
            break
        step = error / (power * (w + 1) - (w + 2) * error / (2 * w + 2))
        w -= step
        if abs(step) < 1e-16 * max(1.0, abs(w)):
            break
    return w


def young_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def daly_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2 * mtbf_seconds)
    return young_seconds(cost_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def exact_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """The exact optimum. Below c/M of 1e-9, where the argument of W₀ has no digits left, Daly's form agrees to 1e-9."""
    if cost_seconds / mtbf_seconds < 1e-9:
        return daly_seconds(cost_seconds, mtbf_seconds)
    return mtbf_seconds * (1 + lambert_w0(-math.exp(-cost_seconds / mtbf_seconds - 1)))


def exact_ettr(interval_seconds: float, saving: Saving, mtbf_seconds: float) -> float:
    """The kept share of the wall clock under the exact Poisson model; 0 when nothing is ever kept."""
    waits = saving.restart_seconds + saving.lag_seconds * (1 - saving.slowdown)
    period = (interval_seconds + saving.cost_seconds) / mtbf_seconds
    if period > 700:  # e^period overflows: a save never completes
        return 0.0
    return interval_seconds * math.exp(-waits / mtbf_seconds) / (mtbf_seconds * math.expm1(period))


def first_order_ettr(interval_seconds: float, saving: Saving, mtbf_seconds: float) -> float:
    """[1 − (R + D + P/2)/M] / (1 + c/P), the form of Meta's reliability study (arXiv 2410.21680) with a lag added."""
    return (1 - _loss(interval_seconds, saving) / mtbf_seconds) / (1 + saving.cost_seconds / interval_seconds)


def optimum_seconds(saving: Saving, mtbf_seconds: float) -> float:
    """The exact optimum, not below what saves in flight allow."""
    return max(exact_seconds(saving.cost_seconds, mtbf_seconds), saving.shortest_interval_seconds)


def plan_interval(
    saving: Saving,
    rate: FailureRate,
    *,
    interval_seconds: float | None = None,
    num_simulated: int = 4000,
    seed: int = 0,
) -> IntervalPlan:
    """The optimum for this saving and rate, and `interval_seconds` (default: the optimum) judged beside it.

    All in seconds. Raises UsageError for impossible figures. Ends at the Poisson model: see FailureRate.
    """
    mtbf, cost = rate.mtbf_seconds, saving.cost_seconds
    best = optimum_seconds(saving, mtbf)
    chosen = best if interval_seconds is None else checks.positive("interval", interval_seconds, "--every 10min")
    is_valid = _loss(chosen, saving) / mtbf < FIRST_ORDER_LIMIT
    ends = [None if end is None else optimum_seconds(saving, end) for end in (rate.lower_seconds, rate.upper_seconds)]
    tier = Tier(interval_seconds=chosen, lag_seconds=saving.lag_seconds, restart_seconds=saving.restart_seconds)
    request = SimulationRequest(
        mtbf_seconds=mtbf, blocked_seconds=saving.blocked_seconds, slowdown=saving.slowdown, durable=tier,
        num_failures=num_simulated, seed=seed,
    )  # fmt: skip
    return IntervalPlan(
        saving=saving,
        rate=rate,
        young_seconds=young_seconds(cost, mtbf),
        daly_seconds=daly_seconds(cost, mtbf),
        exact_seconds=exact_seconds(cost, mtbf),
        optimum_seconds=best,
        optimum_at_lower_mtbf_seconds=ends[0],
        optimum_at_upper_mtbf_seconds=ends[1],
        chosen=point(chosen, saving, mtbf),
        best=point(best, saving, mtbf),
        curve=tuple(point(best * 2 ** (step / 2), saving, mtbf) for step in range(-6, 7)),
        mean_loss_seconds=_loss(chosen, saving),
        largest_loss_seconds=_loss(chosen, saving) + chosen / 2,
        first_order_ettr=first_order_ettr(chosen, saving, mtbf) if is_valid else None,
        simulated=simulate(request),
        warnings=tuple(_warnings(saving, rate, chosen, is_valid=is_valid)),
    )


def point(interval_seconds: float, saving: Saving, mtbf_seconds: float) -> Point:
    """One interval judged."""
    cost = saving.cost_seconds
    return Point(
        interval_seconds=interval_seconds,
        overhead=cost / (interval_seconds + cost),
        loss=_loss(interval_seconds, saving) / mtbf_seconds,
        ettr=exact_ettr(interval_seconds, saving, mtbf_seconds),
    )


def _loss(interval_seconds: float, saving: Saving) -> float:
    return saving.restart_seconds + saving.lag_seconds + interval_seconds / 2


def _warnings(saving: Saving, rate: FailureRate, chosen: float, *, is_valid: bool) -> list[str]:
    found = []
    if not is_valid:
        found.append(
            f"(restart + lag + half an interval) is {_loss(chosen, saving) / rate.mtbf_seconds:.0%} of the MTBF: the "
            "first-order formula is out of its range (25 %); use the exact figure and the simulation"
        )
    if chosen < saving.shortest_interval_seconds:
        found.append(
            f"an interval of {chosen:.0f} s is shorter than the lag allows ({saving.shortest_interval_seconds:.0f} s): "
            "saves would pile up"
        )
    if rate.num_failures is not None and rate.num_failures < 10:
        found.append(f"{rate.num_failures} failures say little about the MTBF: look at both ends of its interval")
    return found
