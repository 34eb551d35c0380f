"""Learning rates for another batch size: two rules, each a hypothesis with the comparison that would refute it.

    linear        η' = κη with gradual warm-up; SGD             Goyal et al. (arXiv 1706.02677)
    square root   η' = √κ·η, β' = 1 − κ(1 − β), ε' = ε/√κ; Adam  Malladi et al. (arXiv 2205.10287 v3)
    fixed         η' = η                                        the baseline that always belongs in the comparison

κ is the new batch over the old. The square-root rule holds only while κ(1 − β) < 1 for both β: with β₁ = 0.9
below κ = 10.
Scaling the learning rate alone by √κ is a third thing that the paper does not derive. Neither rule is a theorem about
fine-tuning, and larger batches save wall clock only as far as kernels and communication let them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from samerun.errors import UsageError
from samerun.plan import checks


class Rule(Enum):
    LINEAR = "linear"
    SQUARE_ROOT = "square-root"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """What an optimizer is set to. β and ε are None for SGD."""

    lr: float
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        checks.positive("learning rate", self.lr, "--lr 3e-4")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UsageError(
                    f"{name} must be at least 0 and below 1, got {value:g}; write it like --betas 0.9 0.999"
                )
        if self.eps is not None:
            checks.positive("epsilon", self.eps, "--eps 1e-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One arm of the comparison. `hyper` is None where the rule is refused, and `why` says the reason."""

    name: str
    hyper: Hyper | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """The arms to run at equal data, the fixed one among them."""

    SCHEMA: ClassVar[str] = "samerun.plan.scaling.v1"

    old_batch: int
    new_batch: int
    factor: float
    """κ."""
    before: Hyper
    candidates: tuple[Candidate, ...]
    num_samples: int | None
    """Equal data for every arm, when given."""
    old_updates: int | None
    new_updates: int | None


def linear_rule(before: Hyper, factor: float) -> Hyper:
    """η' = κη; nothing else changes."""
    return Hyper(lr=before.lr * factor, beta1=before.beta1, beta2=before.beta2, eps=before.eps)


def square_root_rule(before: Hyper, factor: float) -> Hyper:
    """The Adam rule for lr, both β and ε. Raises UsageError where κ(1 − β) ≥ 1: β' would not be a coefficient."""
    if before.beta1 is None or before.beta2 is None or before.eps is None:
        raise UsageError("the square-root rule is for Adam: give --betas 0.9 0.999 --eps 1e-8")
    limit = largest_factor(before.beta1, before.beta2)
    if factor >= limit:
        small = min(before.beta1, before.beta2)
        raise UsageError(
            f"κ = {factor:g} is outside the square-root rule: κ(1 − β) = {factor * (1 - small):.3g} ≥ 1 "
            f"for β = {small:g}; it holds below κ = {limit:.4g}"
        )
    return Hyper(
        lr=before.lr * math.sqrt(factor),
        beta1=1 - factor * (1 - before.beta1),
        beta2=1 - factor * (1 - before.beta2),
        eps=before.eps / math.sqrt(factor),
    )


def largest_factor(beta1: float, beta2: float) -> float:
    """κ must stay below 1/(1 − min β)."""
    return round(1 / (1 - min(beta1, beta2)), 9)


def plan_scaling(before: Hyper, old_batch: int, new_batch: int, *, num_samples: int | None = None) -> ScalingPlan:
    """The hypotheses for a batch of `new_batch` samples instead of `old_batch`, at the same number of samples."""
    checks.whole("old batch", old_batch, "--from 64")
    checks.whole("new batch", new_batch, "--to 256")
    factor = new_batch / old_batch
    is_adam = before.beta1 is not None
    fixed = Candidate(name=Rule.FIXED.value, hyper=before, why="baseline: the batch may need no other learning rate")
    return ScalingPlan(
        old_batch=old_batch,
        new_batch=new_batch,
        factor=factor,
        before=before,
        candidates=(fixed, _linear(before, factor, is_adam=is_adam), *_roots(before, factor, is_adam=is_adam)),
        num_samples=num_samples,
        old_updates=None if num_samples is None else math.ceil(num_samples / old_batch),
        new_updates=None if num_samples is None else math.ceil(num_samples / new_batch),
    )


def _linear(before: Hyper, factor: float, *, is_adam: bool) -> Candidate:
    why = (
        "derived for SGD, not for Adam"
        if is_adam
        else "with gradual warm-up; assumes gradients change little in κ steps"
    )
    return Candidate(name=Rule.LINEAR.value, hyper=linear_rule(before, factor), why=why)


def _roots(before: Hyper, factor: float, *, is_adam: bool) -> tuple[Candidate, ...]:
    name = Rule.SQUARE_ROOT.value
    if not is_adam:
        return (Candidate(name=name, hyper=None, why="derived for Adam; give --betas and --eps to try it"),)
    try:
        root = Candidate(name=name, hyper=square_root_rule(before, factor), why="lr, both β and ε change together")
    except UsageError as refused:
        root = Candidate(name=name, hyper=None, why=str(refused))
    only_lr = Hyper(lr=before.lr * math.sqrt(factor), beta1=before.beta1, beta2=before.beta2, eps=before.eps)
    return root, Candidate(name="square-root, lr only", hyper=only_lr, why="common, but not what the paper derives")
