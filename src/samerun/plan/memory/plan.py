"""The memory plan: terms, bounds per phase, a verdict.

`fits`            the upper bound is known and not above the device
`does not fit`    the lower bound is above the device: no implementation of this plan can run
`cannot tell`     the device lies between the bounds, or something needed for the upper bound was not given

The bounds hold for one rank of the fullest pipeline stage. They end at what no tensor accounts for (CUDA context,
communication buffers, fragmentation: one stated reserve) and at operators that keep more than the eager reference ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from samerun.plan.memory.activations import activation_terms
from samerun.plan.memory.counts import rank_counts
from samerun.plan.memory.request import Layout, MemoryRequest, Microbatch
from samerun.plan.memory.states import state_terms
from samerun.plan.memory.term import Phase, Term
from samerun.plan.memory.transient import host_terms, transient_terms
from samerun.plan.mesh import Mesh

_PHASES: Final = tuple(Phase)


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
    found = _stages(request)
    fullest = max(found, key=lambda stage: (stage.upper_bytes or 0, stage.lower_bytes))
    lower, upper = _bounds(found)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some terms and their sums in bytes, in the order of `Phase`; an upper sum is None when a term's is unknown."""

    terms: tuple[Term, ...]
    lower: tuple[int, ...]
    upper: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """What a rank of one pipeline stage holds."""

    is_last: bool
    state: _Part
    activations: _Part
    transient: _Part

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*self.state.terms, *self.activations.terms, *self.transient.terms)

    @property
    def lower(self) -> tuple[int, ...]:
        """At least, in the order of `Phase`."""
        return tuple(map(sum, zip(self.state.lower, self.activations.lower, self.transient.lower, strict=True)))

    @property
    def upper(self) -> tuple[int | None, ...]:
        """At most, in the order of `Phase`."""
        return tuple(
            None if a is None or b is None or c is None else a + b + c
            for a, b, c in zip(self.state.upper, self.activations.upper, self.transient.upper, strict=True)
        )

    @property
    def lower_bytes(self) -> int:
        return max(self.lower)

    @property
    def upper_bytes(self) -> int | None:
        return _largest(self.upper)


def _stages(request: MemoryRequest) -> list[_Stage]:
    """The pipeline stages that may be the fullest: the first and the last, or the only one."""
    return [
        _Stage(
            is_last=is_last,
            state=_state(request, is_last=is_last),
            activations=_activations(request, is_last=is_last),
            transient=_transient(request, is_last=is_last),
        )
        for is_last in _ends(request)
    ]


def _bounds(found: Sequence[_Stage]) -> tuple[int, int | None]:
    """(at least, at most) of the fullest stage."""
    return max(stage.lower_bytes for stage in found), _largest(stage.upper_bytes for stage in found)


class PeakBounds:
    """The bounds of `plan_memory` for requests that differ in `layout` and `batch` alone, without counting twice.

    The state depends on the layout and on whether a window has several microbatches; activations on the mesh and the
    microbatch, not on the ZeRO stage; what is transient on the layout alone. A part that came to depend on more would
    be reused where it does not hold; the tests compare with fresh plans over every option.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[Layout, bool, bool], _Part] = {}
        self._activated: dict[tuple[Mesh, bool, int, Microbatch, bool], _Part] = {}
        self._transients: dict[tuple[Layout, bool], _Part] = {}

    def of(self, request: MemoryRequest) -> tuple[int, int | None]:
        """(at least, at most) in bytes on the fullest stage."""
        return _bounds([self._stage(request, is_last=is_last) for is_last in _ends(request)])

    def _stage(self, request: MemoryRequest, *, is_last: bool) -> _Stage:
        layout, batch = request.layout, request.batch
        state_key = layout, batch.num_accumulated > 1, is_last
        if state_key not in self._states:
            self._states[state_key] = _state(request, is_last=is_last)
        key = layout.mesh, layout.is_sequence_parallel, layout.num_interleaved, batch, is_last
        if key not in self._activated:
            self._activated[key] = _activations(request, is_last=is_last)
        if (layout, is_last) not in self._transients:
            self._transients[layout, is_last] = _transient(request, is_last=is_last)
        return _Stage(
            is_last=is_last,
            state=self._states[state_key],
            activations=self._activated[key],
            transient=self._transients[layout, is_last],
        )


def _largest(sizes: Iterable[int | None]) -> int | None:
    """The largest of them; None when one is unknown."""
    found = 0
    for size in sizes:
        if size is None:
            return None
        found = max(found, size)
    return found


def _ends(request: MemoryRequest) -> tuple[bool, ...]:
    return (True,) if request.layout.mesh.num_pipeline == 1 else (False, True)


def _state(request: MemoryRequest, *, is_last: bool) -> _Part:
    return _part(state_terms(request, rank_counts(request, is_last_stage=is_last)))


def _activations(request: MemoryRequest, *, is_last: bool) -> _Part:
    return _part(activation_terms(request, rank_counts(request, is_last_stage=is_last), is_last_stage=is_last))


def _transient(request: MemoryRequest, *, is_last: bool) -> _Part:
    return _part(transient_terms(request, rank_counts(request, is_last_stage=is_last)))


def _part(terms: list[Term]) -> _Part:
    return _Part(
        terms=tuple(terms),
        lower=tuple(sum(term.lower_in(phase) for term in terms) for phase in _PHASES),
        upper=tuple(_sum_upper(terms, phase) for phase in _PHASES),
    )


def _sum_upper(terms: list[Term], phase: Phase) -> int | None:
    total = 0
    for term in terms:
        size = term.upper_in(phase)
        if size is None:
            return None
        total += size
    return total
