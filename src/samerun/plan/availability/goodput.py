"""Where the wall clock goes: kept work, work done twice, saving, restarting, waiting.

First order, for failures of mean time M:

    loss of one failure   share_near · (R₁ + D₁ + P₁/2) + (1 − share_near) · (R + D + P/2)
    ETTR                  [1 − loss/M − loss_noticed/M_p] / (1 + c/P₁)    effective training time ratio, without queue
    goodput               ETTR with the queue of each interruption in the wall clock

where the near tier (local disk, a neighbour's memory) survives a share of the failures, and a noticed preemption
that is saved in time (probability q) loses only the restart: loss_noticed = R + (1 − q)(D + P/2). One tier is
share_near = 0, and then the form is Meta's (arXiv 2410.21680): (1 − N·r·(u₀ + Δt/2)) / (1 + w/Δt).

Quoted only below loss/M = 0.25; the simulation goes further, and does not know noticed preemptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from samerun.errors import UsageError
from samerun.plan import checks
from samerun.plan.availability.interval import FIRST_ORDER_LIMIT
from samerun.plan.availability.mtbf import FailureRate
from samerun.plan.availability.simulation import Simulated, SimulationRequest, Tier, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemptions:
    """Interruptions with a warning: how often, and how often the save makes it."""

    mean_seconds: float
    success: float

    def __post_init__(self) -> None:
        checks.positive("time between preemptions", self.mean_seconds, "--preempted-every 12h")
        checks.fraction("share of preemptions saved in time", self.success, "--saved-in-time 0.9")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputRequest:
    """One way to save on one kind of cluster. Seconds throughout."""

    rate: FailureRate
    durable: Tier
    blocked_seconds: float
    slowdown: float = 0.0
    near: Tier | None = None
    near_share: float = 0.0
    preemptions: Preemptions | None = None
    queue_seconds: float = 0.0
    """Waiting for machines after an interruption; counted in goodput, not in ETTR."""
    weibull_shape: float = 1.0

    def __post_init__(self) -> None:
        checks.not_negative("save time in seconds", self.blocked_seconds, "--save 90s")
        checks.not_negative("queue time in seconds", self.queue_seconds, "--queue 20min")
        checks.fraction("slow-down", self.slowdown, "--slowdown 0.05")
        checks.fraction("near share", self.near_share, "--near-share 0.75")
        if self.near is not None:
            ratio = self.durable.interval_seconds / self.near.interval_seconds
            if ratio < 1 or abs(ratio - round(ratio)) > 1e-9:
                raise UsageError(
                    f"the durable interval ({self.durable.interval_seconds:g} s) must be a multiple of the near one "
                    f"({self.near.interval_seconds:g} s); write it like --near-every 2min --every 30min"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the wall clock, without the queue; they add up to 1."""

    kept: float
    redone: float
    blocked: float
    slowed: float
    restart: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPlan:
    """ETTR and goodput by formula and by simulation."""

    SCHEMA: ClassVar[str] = "samerun.plan.goodput.v1"

    request: GoodputRequest
    ettr: float | None
    """First order; None outside its range."""
    goodput: float
    """With the queue in the wall clock; from the simulated ETTR."""
    loss_seconds: float
    """Of a mean failure: restart, lag, half an interval."""
    shares: Shares
    """From the simulation."""
    simulated: Simulated
    warnings: tuple[str, ...]


def loss_seconds(request: GoodputRequest) -> float:
    """Mean loss of one unannounced failure over the tiers."""
    far = _loss(request.durable)
    if request.near is None:
        return far
    return request.near_share * _loss(request.near) + (1 - request.near_share) * far


def first_order_share(request: GoodputRequest) -> float:
    """The first-order ETTR, whatever its range."""
    often = request.near or request.durable
    per_interval = often.interval_seconds / request.durable.interval_seconds
    cost = request.blocked_seconds + request.slowdown * request.durable.lag_seconds * per_interval
    lost = loss_seconds(request) / request.rate.mtbf_seconds
    if request.preemptions is not None:
        lost += noticed_loss_seconds(request, request.preemptions) / request.preemptions.mean_seconds
    return (1 - lost) / (1 + cost / often.interval_seconds)


def noticed_loss_seconds(request: GoodputRequest, preemptions: Preemptions) -> float:
    """R + (1 − q)(D + P/2) of the durable tier."""
    exposed = _loss(request.durable) - request.durable.restart_seconds
    return request.durable.restart_seconds + (1 - preemptions.success) * exposed


def plan_goodput(request: GoodputRequest, *, num_simulated: int = 4000, seed: int = 0) -> GoodputPlan:
    """ETTR and goodput of one way of saving. Raises UsageError for impossible figures.

    Ends at the models: failures without a common cause, a constant rate, restarts of constant length.
    """
    mtbf = request.rate.mtbf_seconds
    loss = loss_seconds(request)
    is_valid = loss / mtbf < FIRST_ORDER_LIMIT
    lived = simulate(_simulation(request, num_simulated, seed))
    interruptions = 1 / mtbf + (1 / request.preemptions.mean_seconds if request.preemptions else 0.0)
    noticed = noticed_loss_seconds(request, request.preemptions) if request.preemptions else 0.0
    noticed_share = noticed / request.preemptions.mean_seconds if request.preemptions else 0.0
    kept = max(0.0, lived.ettr * (1 - noticed_share))
    warnings = []
    if not is_valid:
        warnings.append(
            f"a failure loses {loss / mtbf:.0%} of the mean time between failures: the formula is out of its range "
            "(25 %); only the simulation is quoted"
        )
    if request.preemptions is not None:
        warnings.append("noticed preemptions are in the formula and in goodput, not in the simulation")
    return GoodputPlan(
        request=request,
        ettr=first_order_share(request) if is_valid else None,
        goodput=kept / (1 + request.queue_seconds * interruptions),
        loss_seconds=loss,
        shares=_shares(lived),
        simulated=lived,
        warnings=tuple(warnings),
    )


def _loss(tier: Tier) -> float:
    return tier.restart_seconds + tier.lag_seconds + tier.interval_seconds / 2


def _simulation(request: GoodputRequest, num_failures: int, seed: int) -> SimulationRequest:
    return SimulationRequest(
        mtbf_seconds=request.rate.mtbf_seconds, durable=request.durable, blocked_seconds=request.blocked_seconds,
        slowdown=request.slowdown, near=request.near, near_share=request.near_share,
        weibull_shape=request.weibull_shape, num_failures=num_failures, seed=seed,
    )  # fmt: skip


def _shares(lived: Simulated) -> Shares:
    wall = lived.wall_seconds
    return Shares(
        kept=lived.kept_seconds / wall,
        redone=lived.redone_seconds / wall,
        blocked=lived.blocked_seconds / wall,
        slowed=lived.slowed_seconds / wall,
        restart=lived.restart_seconds / wall,
    )
