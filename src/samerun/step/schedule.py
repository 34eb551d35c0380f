"""Learning rates as pure functions of a named clock: updates, samples or tokens.

    lr(update) = base lr of the group · curve.factor(position)

`position` is the clock's reading at the end of the update that uses the rate: the update's own data is counted, so
the first update of a 100-update warm-up gets 1/100 of the rate and the hundredth all of it. The world size never
enters; a resume sets the position, it replays nothing. A skipped window leaves the update clock still and moves the
sample and token clocks, whose data it consumed.

Any torch scheduler works in a curve's place: it is stepped once per update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeGuard

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samerun.core.choice import Choice
from samerun.core.progress import Progress
from samerun.errors import MismatchError, UsageError
from samerun.step.outcome import Decision
from samerun.step.parallel.agree import Agreed

_SAMPLED_POSITIONS: Final = (0, 1, 10, 100, 1000, 10_000)
"""Where a curve that is no dataclass is sampled: its code cannot be compared, its values can."""


class Clock(Choice):
    UPDATES = "updates"
    SAMPLES = "samples"
    TOKENS = "tokens"

    def read(self, progress: Progress) -> int:
        return int(getattr(progress, self.value))


class Curve(Protocol):
    """A frozen value; compared by its fields when a run resumes."""

    def factor(self, position: float) -> float:
        """What the base rate is multiplied by at this reading of the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Linear warm-up over `warmup`, then the base rate for good."""

    warmup: float = 0

    def __post_init__(self) -> None:
        _check(self, warmup=self.warmup)

    def factor(self, position: float) -> float:
        return _warm(position, self.warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLinear:
    """Linear warm-up over `warmup`, then a straight line down to `final` of the base rate at `total`."""

    warmup: float = 0
    total: float
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=self.warmup, total=self.total, final=self.final)

    def factor(self, position: float) -> float:
        if position < self.warmup:
            return _warm(position, self.warmup)
        return self.final + (1.0 - self.final) * (1.0 - _done(position, self.warmup, self.total))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up over `warmup`, then half a cosine down to `final` of the base rate at `total`."""

    warmup: float = 0
    total: float
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=self.warmup, total=self.total, final=self.final)

    def factor(self, position: float) -> float:
        if position < self.warmup:
            return _warm(position, self.warmup)
        half_cosine = (1.0 + math.cos(math.pi * _done(position, self.warmup, self.total))) / 2.0
        return self.final + (1.0 - self.final) * half_cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay:
    """WSD: linear warm-up over `warmup`, the base rate, and over the last `decay` a straight line to `final`."""

    warmup: float = 0
    total: float
    decay: float
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=self.warmup, total=self.total, final=self.final)
        if not 0 <= self.decay <= self.total - self.warmup:
            raise UsageError(
                f"WarmupStableDecay: a decay of {self.decay:g} does not fit between the warm-up's end {self.warmup:g} "
                f"and the total {self.total:g}"
            )

    def factor(self, position: float) -> float:
        if position < self.warmup:
            return _warm(position, self.warmup)
        return self.final + (1.0 - self.final) * (1.0 - _done(position, self.total - self.decay, self.total))


class ClockedSchedule:
    """A curve at work on one optimizer. Holds nothing that moves: the rate follows from the counters."""

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve, clock: Clock) -> None:
        self._optimizer = optimizer
        self._curve = curve
        self._clock = clock
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", _as_float(group["lr"]))
        self._base_lrs = [_as_float(group["initial_lr"]) for group in optimizer.param_groups]

    def set(self, progress: Progress) -> float:
        """Sets every group's rate for the update that brings the counters to `progress`; returns the first one."""
        factor = self._curve.factor(self._clock.read(progress))
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        return self._base_lrs[0] * factor

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the rate is set inside the update, from the counters."""

    def state_dict(self) -> dict[str, Any]:
        curve: Any = self._curve
        if is_dataclass(curve) and not isinstance(curve, type):
            fields = asdict(curve)
        else:
            fields = {"factors": [curve.factor(position) for position in _SAMPLED_POSITIONS]}
        return {
            "curve": {"kind": type(curve).__name__, **fields},
            "clock": self._clock.value,
            "base_lrs": list(self._base_lrs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises MismatchError when the saved curve or clock was another: its position would mean something else."""
        mine = self.state_dict()
        for what in ("clock", "curve"):
            if state[what] != mine[what]:
                raise MismatchError(f"the schedule's {what} was {state[what]}, is {mine[what]}")
        self._base_lrs = [float(base) for base in state["base_lrs"]]


def is_curve(scheduler: Any) -> TypeGuard[Curve]:
    """torch's ConstantLR has a `factor`, too, but a number, and steps by itself."""
    return callable(getattr(scheduler, "factor", None)) and not hasattr(scheduler, "step")


def clocked(
    optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Mapping[str, Any], clock: Clock
) -> dict[str, Any]:
    """The same schedulers with every curve bound to its optimizer. Raises UsageError for what cannot be scheduled."""
    bound: dict[str, Any] = {}
    for name, scheduler in schedulers.items():
        if is_curve(scheduler):
            if name not in optimizers and not (len(optimizers) == 1 and len(schedulers) == 1):
                raise UsageError(f"scheduler {name!r} has no optimizer of that name; there are {sorted(optimizers)}")
            optimizer = optimizers[name] if name in optimizers else next(iter(optimizers.values()))
            bound[name] = ClockedSchedule(optimizer, scheduler, clock)
            continue
        if clock is not Clock.UPDATES:
            raise UsageError(
                f"clock={clock.value!r} needs a curve such as samerun.step.schedule.WarmupCosine(...); a "
                f"{type(scheduler).__name__} counts its own steps, one per update"
            )
        if not hasattr(scheduler, "step"):
            raise UsageError(f"scheduler={scheduler!r} is neither a curve nor has a step() method")
        bound[name] = scheduler
    return bound


def lr_setters(
    schedulers: Mapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    progress: Callable[[], Progress],
) -> dict[str, Callable[[Agreed], float]]:
    """What sets each optimizer's rate inside an update, where a curve does; `progress` reads the counters before it."""
    only = next(iter(optimizers)) if len(optimizers) == 1 else None
    return {
        only or name: partial(_set_lr, scheduler, progress)
        for name, scheduler in schedulers.items()
        if isinstance(scheduler, ClockedSchedule)
    }


def step_schedulers(schedulers: Mapping[str, Any], decision: Decision) -> None:
    """One step for each scheduler whose optimizer made an update; a plateau scheduler waits for its metric."""
    for name, scheduler in schedulers.items():
        outcome = decision.outcomes.get(name)
        updated = decision.updated if outcome is None else outcome.updated
        if updated and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()


def _set_lr(scheduler: ClockedSchedule, progress: Callable[[], Progress], agreed: Agreed) -> float:
    tokens = round(agreed.weight)
    return scheduler.set(progress().after(updated=True, samples=agreed.num_samples, tokens=tokens))


def _warm(position: float, warmup: float) -> float:
    return min(1.0, position / warmup) if warmup > 0 else 1.0


def _done(position: float, start: float, end: float) -> float:
    if position >= end:
        return 1.0
    return max(0.0, position - start) / (end - start) if end > start else 0.0


def _check(curve: object, *, warmup: float, total: float | None = None, final: float = 0.0) -> None:
    name = type(curve).__name__
    if not (math.isfinite(warmup) and warmup >= 0):
        raise UsageError(f"{name}: warmup={warmup} must be a number of updates, samples or tokens, 0 or more")
    if total is not None and not (math.isfinite(total) and total > 0 and total >= warmup):
        raise UsageError(f"{name}: total={total} must be positive and not below the warm-up of {warmup:g}")
    if not 0.0 <= final <= 1.0:
        raise UsageError(f"{name}: final={final} is a fraction of the base rate, 0 to 1")


def _as_float(value: Any) -> float:
    return float(value)
