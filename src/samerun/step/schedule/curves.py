"""Ready-made learning-rate curves and the clocks that they are read on: pure functions, compared by their fields.

Half a cosine after Loshchilov and Hutter, "SGDR" (arXiv 1608.03983); warm-up, stable, decay after Hu et al., "MiniCPM"
(arXiv 2404.06395).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from samerun.core.choice import Choice
from samerun.core.progress import Progress
from samerun.errors import UsageError


class Clock(Choice):
    """What the position of a curve counts, over the whole run."""

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
class _Decaying:
    """Linear warm-up over `warmup`, then from the base rate down to `final` of it at `total`, as `_left` says."""

    warmup: float = 0
    total: float
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=self.warmup, total=self.total, final=self.final)

    def factor(self, position: float) -> float:
        if position < self.warmup:
            return _warm(position, self.warmup)
        return self.final + (1.0 - self.final) * self._left(position)

    def _left(self, position: float) -> float:
        """How much of the way down is still to go, from 1 to 0: a straight line from the warm-up's end on."""
        return 1.0 - _done(position, self.warmup, self.total)


class WarmupLinear(_Decaying):
    """Linear warm-up over `warmup`, then a straight line down to `final` of the base rate at `total`."""

    __slots__ = ()


class WarmupCosine(_Decaying):
    """Linear warm-up over `warmup`, then half a cosine down to `final` of the base rate at `total`."""

    __slots__ = ()

    def _left(self, position: float) -> float:
        return (1.0 + math.cos(math.pi * _done(position, self.warmup, self.total))) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay(_Decaying):
    """WSD: linear warm-up over `warmup`, the base rate, and over the last `decay` a straight line to `final`."""

    decay: float

    def __post_init__(self) -> None:
        _Decaying.__post_init__(self)  # not super(): slots make another class of this one
        if not 0 <= self.decay <= self.total - self.warmup:
            raise UsageError(
                f"WarmupStableDecay: a decay of {self.decay:g} does not fit between the warm-up's end {self.warmup:g} "
                f"and the total {self.total:g}"
            )

    def _left(self, position: float) -> float:
        return 1.0 - _done(position, self.total - self.decay, self.total)


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
