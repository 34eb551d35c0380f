"""The memory plan: terms, bounds per phase, a verdict.

`fits`            the upper bound is known and not above the device
`does not fit`    the lower bound is above the device: no implementation of this plan can run
`cannot tell`     the device lies between the bounds, or something needed for the upper bound was not given

The bounds hold for one rank of the fullest pipeline stage. They end at what no tensor accounts for (CUDA context,
communication buffers, fragmentation: one stated reserve) and at operators that keep more than the eager reference ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from samerun.plan.memory.activations import activation_terms
from samerun.plan.memory.counts import rank_counts
from samerun.plan.memory.request import MemoryRequest
from samerun.plan.memory.states import state_terms
from samerun.plan.memory.term import Phase, Term
from samerun.plan.memory.transient import host_terms, transient_terms


class Verdict(Enum):
    """Judged from two bounds: a plan that may fit is not called one that fits."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one rank needs, at least and at most. `verdict` is None when no device was named."""

    SCHEMA: ClassVar[str] = "samerun.plan.memory.v1"

    request: MemoryRequest
    stage: str
    """The pipeline stage that the terms describe: the fullest one."""
    terms: tuple[Term, ...]
    host_terms: tuple[Term, ...]
    lower_bytes: int
    upper_bytes: int | None
    lower_phase: Phase
    upper_phase: Phase
    verdict: Verdict | None
    short_bytes: int
    """By how much the lower bound exceeds the device; 0 when it does not."""
    left_bytes: int
    """What the device has beyond the lower bound; 0 without a device."""

    @property
    def unknown_terms(self) -> tuple[Term, ...]:
        """The terms whose upper bound needs more input."""
        return tuple(term for term in self.terms if term.upper_bytes is None)

    def term(self, name: str) -> Term:
        """The term of that name; KeyError when the plan has none."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    name: str
    terms: tuple[Term, ...]
    hosts: tuple[Term, ...]
    lower: dict[Phase, int]
    upper: dict[Phase, int | None]

    @property
    def lower_bytes(self) -> int:
        return max(self.lower.values())

    @property
    def upper_bytes(self) -> int | None:
        known = [value for value in self.upper.values() if value is not None]
        return max(known) if len(known) == len(self.upper) else None


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """Bounds on the peak device memory of one rank, term by term, and the verdict for `request.device`.

    Raises UsageError for impossible requests (see MemoryRequest). Sizes in bytes. Sources are in each term.
    """
    stages = [_stage(request, is_last=False), _stage(request, is_last=True)]
    if request.layout.mesh.num_pipeline == 1:
        stages = stages[1:]
    fullest = max(stages, key=lambda stage: (stage.upper_bytes or 0, stage.lower_bytes))
    lower = max(stage.lower_bytes for stage in stages)
    uppers = [stage.upper_bytes for stage in stages]
    upper = None if None in uppers else max(value or 0 for value in uppers)
    device = None if request.device is None else request.device.num_bytes
    return MemoryPlan(
        request=request,
        stage=fullest.name,
        terms=fullest.terms,
        host_terms=fullest.hosts,
        lower_bytes=lower,
        upper_bytes=upper,
        lower_phase=max(Phase, key=lambda phase: fullest.lower[phase]),
        upper_phase=max(Phase, key=lambda phase: fullest.upper[phase] or 0),
        verdict=None if device is None else judge(lower, upper, device),
        short_bytes=0 if device is None else max(0, lower - device),
        left_bytes=0 if device is None else max(0, device - lower),
    )


def judge(lower_bytes: int, upper_bytes: int | None, device_bytes: int) -> Verdict:
    """The verdict from two bounds and a capacity, all in bytes; `upper_bytes` None means unknown."""
    if lower_bytes > device_bytes:
        return Verdict.DOES_NOT_FIT
    if upper_bytes is not None and upper_bytes <= device_bytes:
        return Verdict.FITS
    return Verdict.CANNOT_TELL


def _stage(request: MemoryRequest, *, is_last: bool) -> _Stage:
    counts = rank_counts(request, is_last_stage=is_last)
    state = state_terms(request, counts)
    terms = (
        *state,
        *activation_terms(request, counts, is_last_stage=is_last),
        *transient_terms(request, counts),
    )
    return _Stage(
        name="only" if request.layout.mesh.num_pipeline == 1 else "last" if is_last else "first",
        terms=terms,
        hosts=tuple(host_terms(request, state)),
        lower={phase: sum(term.lower_in(phase) for term in terms) for phase in Phase},
        upper={phase: _sum_upper(terms, phase) for phase in Phase},
    )


def _sum_upper(terms: tuple[Term, ...], phase: Phase) -> int | None:
    sizes = [term.upper_in(phase) for term in terms]
    return None if None in sizes else sum(size or 0 for size in sizes)
