"""Learning rates as pure functions of a named clock: updates, samples or tokens.

    lr(update) = base lr of the group · curve.factor(position)

`position` is the clock's reading at the end of the update that uses the rate: the update's own data is counted, so
the first update of a 100-update warm-up gets 1/100 of the rate and the hundredth all of it. The world size never
enters; a resume sets the position, it replays nothing. A skipped window leaves the update clock still and moves the
sample and token clocks, whose data it consumed.

A changed batch moves the milestones of a curve on the update clock in data, and one on the data clocks in updates; so
from such an edge on the position may be counted by another counter:

    position = position at the edge + (counter − counter at the edge) · (positions / counter, as it was before the edge)

Any torch scheduler works in a curve's place: it is stepped once per update.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any, Final, TypeGuard

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samerun.core.progress import Progress
from samerun.errors import MismatchError, UsageError
from samerun.step.outcome import Decision
from samerun.step.parallel.agree import Agreed
from samerun.step.schedule.curves import Clock, Curve

_SAMPLED_POSITIONS: Final = (0, 1, 10, 100, 1000, 10_000)
"""Where a curve that is no dataclass is sampled: its code cannot be compared, its values can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """From an edge on, a position is counted by another counter than the clock's own."""

    by: Clock
    progress: Progress
    """At the edge."""
    position: float
    """Of the clock, there."""
    per_count: float
    """Positions that one count of `by` is worth."""

    def read(self, progress: Progress) -> float:
        return self.position + (self.by.read(progress) - self.by.read(self.progress)) * self.per_count

    def to_json(self) -> dict[str, Any]:
        return {
            "by": self.by.value,
            "progress": self.progress.to_json(),
            "position": self.position,
            "per_count": self.per_count,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Origin:
        return cls(
            by=Clock(value["by"]),
            progress=Progress.from_json(value["progress"]),
            position=float(value["position"]),
            per_count=float(value["per_count"]),
        )


class ClockedSchedule:
    """A curve at work on one optimizer. Holds nothing that moves: the rate follows from the counters.

    `may_change`: a state that was saved under another curve or clock is taken all the same; `replaced` then holds it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, curve: Curve, clock: Clock, *, may_change: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._curve = curve
        self._clock = clock
        self._origin: Origin | None = None
        self.may_change = may_change
        """Whether a state that was saved under another curve or clock is taken."""
        self.replaced: Mapping[str, Any] | None = None
        """The saved curve and clock, where the last load found others than these."""
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", _as_float(group["lr"]))
        self._base_lrs = [_as_float(group["initial_lr"]) for group in optimizer.param_groups]

    def set(self, progress: Progress) -> float:
        """Sets every group's rate for the update that brings the counters to `progress`; returns the first one."""
        factor = _factor(self._curve, self.position(progress))
        for group in self._optimizer.param_groups[len(self._base_lrs) :]:  # added since, at its full rate
            self._base_lrs.append(_as_float(group.setdefault("initial_lr", _as_float(group["lr"]))))
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        return self._base_lrs[0] * factor

    @property
    def clock(self) -> Clock:
        return self._clock

    def position(self, progress: Progress) -> float:
        """The clock's reading, in its own unit."""
        return self._clock.read(progress) if self._origin is None else self._origin.read(progress)

    def count_by(self, counter: Clock, progress: Progress) -> None:
        """From `progress` on the position goes on with `counter`, at the exchange rate so far.

        An update is a window here: how many were skipped says nothing about a batch.
        """
        origin = self._origin
        if counter is (self._clock if origin is None else origin.by):
            return
        position = self.position(progress)
        if origin is None:
            gained, counted = _read_windows(self._clock, progress), _read_windows(counter, progress)
        else:
            gained = position - origin.position
            counted = _read_windows(counter, progress) - _read_windows(counter, origin.progress)
        if gained and counted:  # else nothing was trained on since: there is no exchange rate to carry over
            self._origin = Origin(by=counter, progress=progress, position=position, per_count=gained / counted)

    def describe(self, progress: Progress) -> str:
        """Curve, clock, position and rate, for a before and after."""
        origin = self._origin
        counted = "" if origin is None else f" ({origin.per_count:g} for each of the {origin.by.value})"
        rate = self._base_lrs[0] * self._curve.factor(self.position(progress))
        return f"{self._curve} on {self._clock.value}{counted}, rate {rate:.4g} at {self.position(progress):g}"

    def describe_replaced(self) -> str | None:
        """The same of the saved curve or clock that another one took the place of; None where none did."""
        if self.replaced is None:
            return None
        curve = self.replaced["curve"]
        fields = ", ".join(f"{key}={value}" for key, value in curve.items() if key != "kind")
        rate = _as_float(self._optimizer.param_groups[0]["lr"])
        return f"{curve['kind']}({fields}) on {self.replaced['clock']}, rate {rate:.4g} in the last update"

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
            "origin": self._origin.to_json() if self._origin is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises MismatchError when the saved curve or clock was another: its position would mean something else."""
        mine = self.state_dict()
        self.replaced = None
        for what in ("clock", "curve"):
            if state[what] != mine[what]:
                if not self.may_change:
                    raise MismatchError(f"the schedule's {what} was {state[what]}, is {mine[what]}")
                self.replaced = state
        if len(state["base_lrs"]) != len(self._optimizer.param_groups):
            raise MismatchError(
                f"the schedule was saved for {len(state['base_lrs'])} parameter groups, the optimizer has "
                f"{len(self._optimizer.param_groups)}; build the groups as they were when it was saved"
            )
        same_clock = state["clock"] == mine["clock"]
        self._origin = Origin.from_json(state["origin"]) if same_clock and state.get("origin") else None
        self._base_lrs = [float(base) for base in state["base_lrs"]]


def is_curve(scheduler: Any) -> TypeGuard[Curve]:
    """torch's ConstantLR has a `factor`, too, but a number, and steps by itself."""
    return callable(getattr(scheduler, "factor", None)) and not hasattr(scheduler, "step")


def clocked(
    optimizers: Mapping[str, torch.optim.Optimizer],
    schedulers: Mapping[str, Any],
    clock: Clock,
    *,
    may_change: bool = False,
) -> dict[str, Any]:
    """The same schedulers with every curve bound to its optimizer. Raises UsageError for what cannot be scheduled."""
    bound: dict[str, Any] = {}
    for name, scheduler in schedulers.items():
        if isinstance(scheduler, type):
            raise UsageError(f"scheduler {name}: {scheduler.__name__} is a class; write {scheduler.__name__}(…)")
        if is_curve(scheduler):
            _factor(scheduler, 1.0)
            if name not in optimizers and not (len(optimizers) == 1 and len(schedulers) == 1):
                raise UsageError(f"scheduler {name!r} has no optimizer of that name; there are {sorted(optimizers)}")
            optimizer = optimizers[name] if name in optimizers else next(iter(optimizers.values()))
            bound[name] = ClockedSchedule(optimizer, scheduler, clock, may_change=may_change)
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


def _factor(curve: Curve, position: float) -> float:
    """Raises UsageError for what would spoil every weight: it is asked inside an update, alike on all ranks."""
    factor: Any = curve.factor(position)
    if not isinstance(factor, numbers.Real) or not 0 <= float(factor) < math.inf:
        raise UsageError(
            f"{type(curve).__name__}.factor({position:g}) is {factor!r}; the base rate is multiplied by it, so it must "
            f"be a finite number, 0 or more"
        )
    return float(factor)


def _read_windows(clock: Clock, progress: Progress) -> float:
    return int(progress.windows) if clock is Clock.UPDATES else clock.read(progress)


def _as_float(value: Any) -> float:
    return float(value)
