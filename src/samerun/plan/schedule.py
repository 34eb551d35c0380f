"""Warm-up and decay on a clock: updates, samples or tokens, and what happens to them when the batch changes.

The learning rate is a pure function of the clock's position. The world size never enters, and a resume sets the
position, it does not replay steps. 100 warm-up updates are 6,400 samples at 64 a batch and 12,800 at 128: changing
the batch of a schedule on the update clock moves its milestones in data, so a remap has to say what it keeps:

    data       milestones stay at the same sample: remaining updates = ⌈(total samples − consumed) / B'⌉
    updates    milestones stay at the same update: the data they need changes

A schedule on the sample or token clock needs no choice: it keeps the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from samerun.errors import UsageError
from samerun.plan import checks


class Clock(Enum):
    """What positions of a schedule count: successful updates, samples or tokens."""

    UPDATES = "updates"
    SAMPLES = "samples"
    TOKENS = "tokens"


class Decay(Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Keep(Enum):
    DATA = "data"
    UPDATES = "updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak_lr`, then a decay to `final_fraction` of it at `total`; positions on `clock`."""

    clock: Clock = Clock.UPDATES
    peak_lr: float
    warmup: float
    total: float
    decay: Decay = Decay.COSINE
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        checks.positive("peak learning rate", self.peak_lr, "--lr 3e-4")
        checks.not_negative("warm-up", self.warmup, "--warmup '100 updates'")
        checks.positive("total", self.total, "--total '2000 updates'")
        checks.fraction("final fraction", self.final_fraction, "--final 0.1")
        if self.warmup > self.total:
            raise UsageError(
                f"warm-up of {self.warmup:g} {self.clock.value} is longer than the total of {self.total:g}; "
                f"write --warmup '{self.total / 20:g} {self.clock.value}'"
            )


def lr_at(schedule: Schedule, position: float) -> float:
    """The learning rate at a position of the clock (0 is before the first update). Constant after the total."""
    if position < schedule.warmup:
        return schedule.peak_lr * position / schedule.warmup
    if schedule.decay is Decay.CONSTANT:
        return schedule.peak_lr
    span = schedule.total - schedule.warmup
    done = min(1.0, (position - schedule.warmup) / span) if span else 1.0
    left = 1 - done if schedule.decay is Decay.LINEAR else (1 + math.cos(math.pi * done)) / 2
    return schedule.peak_lr * (schedule.final_fraction + (1 - schedule.final_fraction) * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """One milestone on all three clocks; tokens None when the tokens of a sample are not known."""

    updates: float
    samples: float
    tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remap:
    """A batch changed at an edge: what was done, what is kept, what follows."""

    new_batch: int
    keep: Keep
    done: Amounts
    remaining_updates: int
    schedule: Schedule
    """The schedule after the edge, positions counted from the run's start. With data kept its clock counts samples."""
    warmup: Amounts
    total: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """A schedule's milestones on every clock, and the same after a change of batch."""

    SCHEMA: ClassVar[str] = "samerun.plan.schedule.v1"

    schedule: Schedule
    global_batch: int
    tokens_per_sample: float | None
    warmup: Amounts
    total: Amounts
    remap: Remap | None


def plan_schedule(schedule: Schedule, global_batch: int, *, tokens_per_sample: float | None = None) -> SchedulePlan:
    """Milestones in updates, samples and tokens. Raises UsageError when the token clock has no tokens per sample."""
    batch = checks.whole("global batch", global_batch, "--global 64")
    if tokens_per_sample is not None:
        checks.positive("tokens per sample", tokens_per_sample, "--seq 4096")
    return SchedulePlan(
        schedule=schedule,
        global_batch=batch,
        tokens_per_sample=tokens_per_sample,
        warmup=_amounts(schedule.warmup, schedule.clock, batch, tokens_per_sample),
        total=_amounts(schedule.total, schedule.clock, batch, tokens_per_sample),
        remap=None,
    )


def remap(plan: SchedulePlan, new_batch: int, *, done_updates: int, keep: Keep | None = None) -> SchedulePlan:
    """The plan with a batch of `new_batch` from the edge after `done_updates` (no window skipped before it).

    On the update clock `keep` must be chosen; UsageError otherwise, or when the edge lies beyond the total.
    """
    checks.whole("new batch", new_batch, "--to 128")
    checks.not_negative("updates done", done_updates, "--at 500")
    schedule, batch = plan.schedule, plan.global_batch
    if schedule.clock is not Clock.UPDATES:
        keep = Keep.DATA
    if keep is None:
        where = "inside the warm-up" if done_updates < schedule.warmup else "after the warm-up"
        raise UsageError(
            f"update {done_updates} lies {where}, and the schedule counts updates: write --keep data "
            "(milestones stay at the same sample) or --keep updates (they stay at the same update)"
        )
    if done_updates >= plan.total.updates:
        raise UsageError(f"update {done_updates} is not before the total of {plan.total.updates:g}; write --at 0")
    done = _amounts(done_updates, Clock.UPDATES, batch, plan.tokens_per_sample)
    moved = _moved(schedule, batch, keep)
    warmup = _after(plan, plan.warmup, done, new_batch, keep)
    total = _after(plan, plan.total, done, new_batch, keep)
    remaining = math.ceil(round(total.updates - done_updates, 9))
    return SchedulePlan(
        schedule=schedule,
        global_batch=batch,
        tokens_per_sample=plan.tokens_per_sample,
        warmup=plan.warmup,
        total=plan.total,
        remap=Remap(
            new_batch=new_batch,
            keep=keep,
            done=done,
            remaining_updates=remaining,
            schedule=moved,
            warmup=warmup,
            total=total,
        ),
    )


def position_at_sample(plan: SchedulePlan, sample: float) -> tuple[float, float | None]:
    """(clock position before any remap, clock position after it) when `sample` samples are done."""
    schedule, batch = plan.schedule, plan.global_batch
    before = _position(schedule.clock, sample, sample / batch, plan.tokens_per_sample)
    if plan.remap is None:
        return before, None
    if sample < plan.remap.done.samples:
        return before, _position(plan.remap.schedule.clock, sample, sample / batch, plan.tokens_per_sample)
    updates = plan.remap.done.updates + (sample - plan.remap.done.samples) / plan.remap.new_batch
    return before, _position(plan.remap.schedule.clock, sample, updates, plan.tokens_per_sample)


def _position(clock: Clock, samples: float, updates: float, tokens_per_sample: float | None) -> float:
    if clock is Clock.UPDATES:
        return updates
    return samples if clock is Clock.SAMPLES else samples * (tokens_per_sample or math.nan)


def _amounts(value: float, clock: Clock, batch: int, tokens_per_sample: float | None) -> Amounts:
    if clock is Clock.UPDATES:
        samples = value * batch
    elif clock is Clock.SAMPLES:
        samples = value
    elif tokens_per_sample is None:
        raise UsageError("a schedule in tokens needs the tokens of a sample: --seq 4096, or --lengths lengths.txt")
    else:
        samples = value / tokens_per_sample
    tokens = None if tokens_per_sample is None else samples * tokens_per_sample
    return Amounts(updates=samples / batch, samples=samples, tokens=tokens)


def _moved(schedule: Schedule, batch: int, keep: Keep) -> Schedule:
    """With data kept, an update clock becomes a sample clock: the rate stays the same function of the sample.

    Stretching the milestones on the update clock instead would make the rate jump at the edge.
    """
    if schedule.clock is not Clock.UPDATES or keep is Keep.UPDATES:
        return schedule
    return replace(schedule, clock=Clock.SAMPLES, warmup=schedule.warmup * batch, total=schedule.total * batch)


def _after(plan: SchedulePlan, before: Amounts, done: Amounts, new_batch: int, keep: Keep) -> Amounts:
    """A milestone on all clocks after the change; one that was passed stays where it was."""
    if before.samples <= done.samples:
        return before
    if keep is Keep.UPDATES:
        updates = before.updates
        samples = done.samples + (updates - done.updates) * new_batch
    else:
        samples = before.samples
        updates = done.updates + (samples - done.samples) / new_batch
    tokens = None if plan.tokens_per_sample is None else samples * plan.tokens_per_sample
    return Amounts(updates=updates, samples=samples, tokens=tokens)
