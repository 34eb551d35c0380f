"""The memory plan: terms, bounds per phase, a verdict.

`fits`            the upper bound is known and not above the device
`does not fit`    the lower bound is above the device: no implementation of this plan can run
`cannot tell`     the device lies between the bounds, or something needed for the upper bound was not given

The bounds hold for one rank of the fullest pipeline stage. They end at what no tensor accounts for (CUDA context,
communication buffers, fragmentation: one stated reserve) and at operators that keep more than the eager reference ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from samerun.plan.memory.peak import bounds, stages
from samerun.plan.memory.request import MemoryRequest
from samerun.plan.memory.term import Phase, Term
from samerun.plan.memory.transient import host_terms


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


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """Bounds on the peak device memory of one rank, term by term, and the verdict for `request.device`.

    Raises UsageError for impossible requests (see MemoryRequest). Sizes in bytes. Sources are in each term.
    """
    found = stages(request)
    fullest = max(found, key=lambda stage: (stage.upper_bytes or 0, stage.lower_bytes))
    lower, upper = bounds(found)
    device = None if request.device is None else request.device.num_bytes
    return MemoryPlan(
        request=request,
        stage="only" if len(found) == 1 else "last" if fullest.is_last else "first",
        terms=fullest.terms,
        host_terms=tuple(host_terms(request, list(fullest.state.terms))),
        lower_bytes=lower,
        upper_bytes=upper,
        lower_phase=_fullest_phase(fullest.lower),
        upper_phase=_fullest_phase(fullest.upper),
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


def _fullest_phase(sizes: Sequence[int | None]) -> Phase:
    return max(zip(Phase, sizes, strict=True), key=lambda each: each[1] or 0)[0]
