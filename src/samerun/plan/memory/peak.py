"""The bytes of one pipeline stage: its terms in three parts, their sums per phase, and the peak over the phases.

state         depends on the layout, and on whether a window has several microbatches
activations   depend on the mesh and the microbatch, not on the ZeRO stage
transient     depends on the layout alone

`PeakBounds` counts each part once for many requests. A part that came to depend on more would be reused where it does
not hold; the tests compare it with fresh plans over every option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from samerun.plan.memory.activations import activation_terms
from samerun.plan.memory.counts import rank_counts
from samerun.plan.memory.request import Layout, MemoryRequest, Microbatch
from samerun.plan.memory.states import state_terms
from samerun.plan.memory.term import Phase, Term
from samerun.plan.memory.transient import transient_terms
from samerun.plan.mesh import Mesh

_PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some terms and their sums in bytes, in the order of `Phase`; an upper sum is None when a term's is unknown."""

    terms: tuple[Term, ...]
    lower: tuple[int, ...]
    upper: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a rank of one pipeline stage holds."""

    is_last: bool
    state: Part
    activations: Part
    transient: Part

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
        return largest(self.upper)


def stages(request: MemoryRequest) -> list[Stage]:
    """The pipeline stages that may be the fullest: the first and the last, or the only one."""
    return [
        Stage(
            is_last=is_last,
            state=_state(request, is_last=is_last),
            activations=_activations(request, is_last=is_last),
            transient=_transient(request, is_last=is_last),
        )
        for is_last in _ends(request)
    ]


def bounds(found: Sequence[Stage]) -> tuple[int, int | None]:
    """(at least, at most) of the fullest stage."""
    return max(stage.lower_bytes for stage in found), largest(stage.upper_bytes for stage in found)


class PeakBounds:
    """`bounds(stages(request))` for requests that differ in `layout` and `batch` alone, without counting twice."""

    def __init__(self) -> None:
        self._states: dict[tuple[Layout, bool, bool], Part] = {}
        self._activated: dict[tuple[Mesh, bool, int, Microbatch, bool], Part] = {}
        self._transients: dict[tuple[Layout, bool], Part] = {}

    def of(self, request: MemoryRequest) -> tuple[int, int | None]:
        """(at least, at most) in bytes on the fullest stage."""
        return bounds([self._stage(request, is_last=is_last) for is_last in _ends(request)])

    def _stage(self, request: MemoryRequest, *, is_last: bool) -> Stage:
        layout, batch = request.layout, request.batch
        state_key = layout, batch.num_accumulated > 1, is_last
        if state_key not in self._states:
            self._states[state_key] = _state(request, is_last=is_last)
        key = layout.mesh, layout.is_sequence_parallel, layout.num_interleaved, batch, is_last
        if key not in self._activated:
            self._activated[key] = _activations(request, is_last=is_last)
        if (layout, is_last) not in self._transients:
            self._transients[layout, is_last] = _transient(request, is_last=is_last)
        return Stage(
            is_last=is_last,
            state=self._states[state_key],
            activations=self._activated[key],
            transient=self._transients[layout, is_last],
        )


def largest(sizes: Iterable[int | None]) -> int | None:
    """The largest of them; None when one is unknown."""
    found = 0
    for size in sizes:
        if size is None:
            return None
        found = max(found, size)
    return found


def _ends(request: MemoryRequest) -> tuple[bool, ...]:
    return (True,) if request.layout.mesh.num_pipeline == 1 else (False, True)


def _state(request: MemoryRequest, *, is_last: bool) -> Part:
    return _part(state_terms(request, rank_counts(request, is_last_stage=is_last)))


def _activations(request: MemoryRequest, *, is_last: bool) -> Part:
    return _part(activation_terms(request, rank_counts(request, is_last_stage=is_last), is_last_stage=is_last))


def _transient(request: MemoryRequest, *, is_last: bool) -> Part:
    return _part(transient_terms(request, rank_counts(request, is_last_stage=is_last)))


def _part(terms: list[Term]) -> Part:
    return Part(
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
