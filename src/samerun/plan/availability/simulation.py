"""A run lived through failure by failure, to check the formulas and to go where they end.

Gaps between failures are exponential, or Weibull of the same mean. After a failure the run restarts (a failure may
hit the restart), works, saves, and keeps what was durable when the next failure came. With two tiers a share of the
failures leaves the near tier readable. Every second is put under exactly one heading, each computed from its own
count, and the headings must add up to the wall clock: `Simulated.imbalance` is their relative difference.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final

from samerun.plan import checks

_NUM_BATCHES: Final = 20
"""Batches for the standard error: few enough that a batch spans many failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Where checkpoints go: how often, how long until they count there, how long a restart from it takes."""

    interval_seconds: float
    """Seconds of work between two saves."""
    lag_seconds: float = 0.0
    restart_seconds: float = 0.0

    def __post_init__(self) -> None:
        checks.positive("interval in seconds", self.interval_seconds, "--every 10min")
        checks.not_negative("lag in seconds", self.lag_seconds, "--lag 8min")
        checks.not_negative("restart time in seconds", self.restart_seconds, "--restart 5min")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What is lived through. With `near`, its interval must go into that of `durable`."""

    mtbf_seconds: float
    durable: Tier
    blocked_seconds: float = 0.0
    slowdown: float = 0.0
    near: Tier | None = None
    near_share: float = 0.0
    """Share of the failures after which the near tier can still be read."""
    weibull_shape: float = 1.0
    """1 is Poisson; below 1 failures come in bursts."""
    num_failures: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        checks.positive("MTBF in seconds", self.mtbf_seconds, "--mtbf 4h")
        checks.positive("Weibull shape", self.weibull_shape, "--weibull 0.7")
        checks.fraction("near share", self.near_share, "--near-share 0.75")
        checks.whole("number of simulated failures", self.num_failures, "--simulate 4000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Where the wall clock went, in seconds, over `num_failures` failures."""

    ettr: float
    standard_error: float
    num_failures: int
    wall_seconds: float
    kept_seconds: float
    redone_seconds: float
    blocked_seconds: float
    slowed_seconds: float
    restart_seconds: float

    @property
    def imbalance(self) -> float:
        """Relative difference between the wall clock and the sum of its parts."""
        parts = self.kept_seconds + self.redone_seconds + self.blocked_seconds + self.slowed_seconds
        return abs(parts + self.restart_seconds - self.wall_seconds) / self.wall_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """The repeating pattern of one stretch: `per` periods of work and save, then the upload's slow-down."""

    work: float
    blocked: float
    slowed: float
    per: int

    @property
    def period(self) -> float:
        return self.work + self.blocked

    @property
    def cycle(self) -> float:
        return self.per * self.period + self.slowed

    def spent(self, seconds: float) -> tuple[float, float, float]:
        """(work, blocked, slowed) in the first `seconds` of the pattern."""
        cycles = math.floor(seconds / self.cycle)
        rest = seconds - cycles * self.cycle
        periods = min(self.per, math.floor(rest / self.period))
        rest -= periods * self.period
        whole = cycles * self.per + periods
        if periods == self.per:
            return whole * self.work, whole * self.blocked, cycles * self.slowed + rest
        work = min(rest, self.work)
        return whole * self.work + work, whole * self.blocked + (rest - work), cycles * self.slowed

    def num_snapshots(self, seconds: float) -> int:
        """Snapshots complete after `seconds`; negative times have none."""
        if seconds < 0:
            return 0
        cycles = math.floor(seconds / self.cycle)
        return cycles * self.per + min(self.per, math.floor((seconds - cycles * self.cycle) / self.period))


@dataclass(slots=True)
class _Books:
    wall: float = 0.0
    executed: float = 0.0
    blocked: float = 0.0
    slowed: float = 0.0
    restart: float = 0.0
    kept: int = 0
    durable: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)


def simulate(request: SimulationRequest) -> Simulated:
    """Lives through `num_failures` failures; the same seed gives the same figures. Exact in its accounting."""
    rng = random.Random(request.seed)
    near = request.near or request.durable
    clock = _Clock(
        work=near.interval_seconds,
        blocked=request.blocked_seconds,
        slowed=request.slowdown * request.durable.lag_seconds,
        per=round(request.durable.interval_seconds / near.interval_seconds),
    )
    scale = request.mtbf_seconds / math.gamma(1 + 1 / request.weibull_shape)
    books = _Books(marks=[(0.0, 0)])
    restart = request.durable.restart_seconds
    stride = max(1, request.num_failures // _NUM_BATCHES)
    for number in range(1, request.num_failures + 1):
        _stretch(books, clock, request, near, rng.weibullvariate(scale, request.weibull_shape), restart)
        is_near = request.near is not None and rng.random() < request.near_share
        restart = near.restart_seconds if is_near else request.durable.restart_seconds
        if not is_near:
            books.kept = books.durable
        if number % stride == 0:
            books.marks.append((books.wall, books.kept))
    return _summary(books, clock, request.num_failures)


def _stretch(
    books: _Books, clock: _Clock, request: SimulationRequest, near: Tier, gap: float, restart: float
) -> None:  # fmt: skip
    """One gap between failures: restart, work from the last kept count, keep what became durable in time.

    Snapshots are counted from zero, and each `per`-th goes to the durable tier, so a restart in between keeps its
    phase: the pattern is entered `offset` periods late.
    """
    books.wall += gap
    books.restart += min(gap, restart)
    running = gap - restart
    if running <= 0:
        return
    offset = books.kept % clock.per
    late = offset * clock.period
    work, blocked, slowed = clock.spent(running + late)
    books.executed += work - offset * clock.work
    books.blocked += blocked - offset * clock.blocked
    books.slowed += slowed
    base = books.kept - offset
    durable = clock.num_snapshots(running + late - request.durable.lag_seconds) // clock.per * clock.per
    books.durable = max(books.durable, base + durable)
    local = base + clock.num_snapshots(running + late - near.lag_seconds)
    books.kept = max(books.kept, books.durable, local)


def _summary(books: _Books, clock: _Clock, num_failures: int) -> Simulated:
    kept = books.kept * clock.work
    ettr = kept / books.wall
    spans = [
        (after_wall - before_wall, (after_kept - before_kept) * clock.work)
        for (before_wall, before_kept), (after_wall, after_kept) in zip(books.marks, books.marks[1:], strict=False)
    ]
    num, mean = len(spans), books.wall / len(spans)
    spread = math.fsum((work - ettr * wall) ** 2 for wall, work in spans)
    return Simulated(
        ettr=ettr,
        standard_error=math.sqrt(spread / max(1, num * (num - 1))) / mean,
        num_failures=num_failures,
        wall_seconds=books.wall,
        kept_seconds=kept,
        redone_seconds=books.executed - kept,
        blocked_seconds=books.blocked,
        slowed_seconds=books.slowed,
        restart_seconds=books.restart,
    )
