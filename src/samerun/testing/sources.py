"""What `Run` needs of a source of data: after any interruption, and on any ranks that it promises, the same windows.

The oracle is the source itself, uninterrupted. Before every course Python's, NumPy's and torch's global generators are
seeded anew, so that what depends on them, and not on the source's own state, shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from samerun.data.source import DataSource, DataWindow, Guarantee, Replica, as_source
from samerun.errors import UsageError
from samerun.state.fingerprint import tensor_digest
from samerun.state.rng import preserved_rng, seed_all

_MASK = 2**64 - 1


def check_source(make: Callable[[], Any], *, windows: int = 6, replicas: Sequence[int] = (2, 3)) -> list[str]:
    """What is wrong with a source, as sentences; empty when it keeps the guarantee that it states.

        assert check_source(lambda: MySource("shards/")) == []

    `make` gives a fresh one each time, as a new process would: whatever `Run(data=…)` accepts. For every edge up to
    `windows` it is resumed in a fresh source, once and twice, also from states that were asked for inside a window, and
    what follows must be what follows without; where it promises `Guarantee.EXACT`, also on each number of `replicas`
    and from one to another. A source that promises nothing (`Guarantee.BEST_EFFORT`) is only asked for valid states.
    Ends at what `windows` windows show, at content that changes between two reads, and at workers' timing. What the
    source raises by itself is not caught.
    """
    if windows < 2:
        raise UsageError(f"windows={windows}: at least 2 are needed to tell an interrupted course from a whole one")
    with preserved_rng():
        trial = _Trial(make, windows)
        if trial.problems:  # nothing can be resumed from these
            return trial.problems
        problems = [*trial.unsound_states(), *trial.misuse()]
        if trial.guarantee is not Guarantee.BEST_EFFORT:
            problems += trial.other_courses()
        if trial.guarantee is Guarantee.EXACT:
            for count in replicas:
                problems += trial.other_replicas(count)
    return problems


@dataclass(frozen=True, slots=True)
class _Seen:
    """One window as one replica was given it."""

    index: int
    start: int
    end: int
    batches: Mapping[int, str]
    """Number of the microbatch → digest of its value."""


class _Trial:
    """One source's: its uninterrupted course, with the state at each edge, and what is held against it."""

    def __init__(self, make: Callable[[], Any], num_windows: int) -> None:
        self._make = make
        self._num_windows = num_windows
        self._num_opened = 0
        self._twin: list[_Seen] = []
        self._states: list[Any] = []
        self.problems: list[str] = []
        """Of the uninterrupted course."""
        with self._opened() as source:
            self.guarantee = source.guarantee
            self._note(source.state_dict())
            for window in islice(source.windows(), num_windows):
                self._twin.append(self._seen(window))
                source.commit(window)
                self._note(source.state_dict())
        if len(self._twin) < num_windows:
            self.problems.append(
                f"windows() ended after {len(self._twin)} windows: it must be endless, as `until` ends a run"
            )

    def unsound_states(self) -> Iterator[str]:
        """A state says only what was decided, and is the same again right after it was loaded."""
        for edge in range(min(3, self._num_windows)):
            with self._opened(self._states[edge]) as source:
                if _saved(source) != self._states[edge]:
                    yield f"the state of edge {edge}, loaded, is not the state that the source then gives"
                ahead = islice(source.windows(), 2)
                next(iter(next(ahead)), None)
                next(ahead, None)
                if _saved(source) != self._states[edge]:
                    yield (
                        f"what was read and not decided changes the state at edge {edge}: a resume would leave it out; "
                        "count in commit(), not where items are fetched"
                    )

    def misuse(self) -> Iterator[str]:
        """What must be refused, since going on would lose samples in silence."""
        with self._opened() as source:
            window = next(iter(source.windows()))
            list(window)
            if _is_accepted(lambda: source.load_state_dict(self._states[-1])):
                yield "load_state_dict() was accepted after iteration began: those samples came from the wrong position"
        with self._opened() as source:
            first, second = islice(source.windows(), 2)
            if _is_accepted(lambda: source.commit(second)):
                yield f"commit() took window {second.index} before window {first.index}: each once, in order"

    def other_courses(self) -> Iterator[str]:
        """The same windows from a fresh source, and from every edge on, resumed once and twice."""
        hint = "does it draw from a global generator, or keep something that its state leaves out?"
        for edge in range(self._num_windows + 1):
            with self._opened(self._states[edge] if edge else None) as source:
                found = self._course(source, self._num_windows - edge)
            what = f"resumed at edge {edge}" if edge else "a second fresh source"
            yield from (f"{what}: {difference}; {hint}" for difference in _differences(self._twin[edge:], found))
        for edge in range(self._num_windows - 1):
            with self._opened(self._states[edge]) as source:
                self._course(source, 1)
                state = _saved(source)
            with self._opened(state) as source:
                found = self._course(source, self._num_windows - edge - 1)
            what = f"resumed at edge {edge} and, one window later, again"
            yield from (f"{what}: {difference}; {hint}" for difference in _differences(self._twin[edge + 1 :], found))

    def other_replicas(self, count: int) -> Iterator[str]:
        """`count` replicas together give the twin's windows, from the start and from a state that one replica saved."""
        for edge in (0, self._num_windows // 2):
            together: list[_Seen] = []
            for index in range(count):
                try:
                    opened = self._opened(self._states[edge] if edge else None, Replica(index=index, count=count))
                except UsageError:
                    return  # too small a batch for so many: refused, as it should be
                with opened as source:
                    found = self._course(source, self._num_windows - edge)
                    if _saved(source) != self._states[-1]:
                        yield f"{count} replicas: replica {index} saves another state than one replica alone"
                together = found if not together else [_joined(a, b) for a, b in zip(together, found, strict=True)]
            what = f"{count} replicas from edge {edge}"
            yield from (f"{what}, together: {difference}" for difference in _differences(self._twin[edge:], together))

    def _opened(self, state: Any = None, replica: Replica | None = None) -> _Opened:
        self._num_opened += 1
        seed_all(self._num_opened)
        source = as_source(self._make())
        source.attach(replica or Replica())
        if state is not None:
            source.load_state_dict(state)
        return _Opened(source)

    def _note(self, state: Any) -> None:
        try:
            self._states.append(json.loads(json.dumps(state, allow_nan=False)))
        except (TypeError, ValueError) as error:
            self.problems.append(f"state_dict() at edge {len(self._twin)} is not plain JSON: {error}")

    def _course(self, source: DataSource, num_windows: int) -> list[_Seen]:
        seen = []
        for window in islice(source.windows(), num_windows):
            seen.append(self._seen(window))
            source.commit(window)
        return seen

    def _seen(self, window: DataWindow) -> _Seen:
        batches, coverage = {}, 0
        for batch in window:
            batches[batch.number] = _digest(batch.value)
            coverage = (coverage + batch.coverage) & _MASK
        alone = len(batches) == window.num_microbatches
        if alone and window.coverage is not None and coverage != window.coverage:
            self.problems.append(
                f"window {window.index}: its microbatches' coverage adds up to {coverage:016x}, the window says "
                f"{window.coverage:016x}: other samples arrived than were planned"
            )
        return _Seen(window.index, window.start, window.end, batches)


class _Opened:
    """Closes the source in the end, whatever it is."""

    def __init__(self, source: DataSource) -> None:
        self._source = source

    def __enter__(self) -> DataSource:
        return self._source

    def __exit__(self, *_: object) -> None:
        self._source.close()


def _differences(expected: Sequence[_Seen], found: Sequence[_Seen]) -> Iterator[str]:
    """The first one."""
    for want, have in zip(expected, found, strict=False):
        if (want.index, want.start, want.end) != (have.index, have.start, have.end):
            yield (
                f"window {want.index} at positions {want.start} to {want.end} became window {have.index} at "
                f"{have.start} to {have.end}"
            )
            return
        wrong = [number for number in sorted({*want.batches, *have.batches}) if not _is_same(number, want, have)]
        if wrong:
            kept = "missing" if wrong[0] not in have.batches else "unexpected"
            how = "holds something else" if wrong[0] in want.batches and wrong[0] in have.batches else f"is {kept}"
            yield f"window {want.index}: microbatch {wrong[0]} {how}"
            return
    if len(found) < len(expected):
        yield f"it ends after {len(found)} windows instead of {len(expected)}"


def _is_same(number: int, want: _Seen, have: _Seen) -> bool:
    return want.batches.get(number) == have.batches.get(number)


def _joined(first: _Seen, second: _Seen) -> _Seen:
    twice = {*first.batches} & {*second.batches}
    both = {**first.batches, **second.batches} | {number: f"twice: {first.batches[number]}" for number in twice}
    return _Seen(first.index, first.start, first.end, both)


def _saved(source: DataSource) -> Any:
    """Its state as it comes back from a checkpoint."""
    return json.loads(json.dumps(source.state_dict(), allow_nan=False))


def _is_accepted(call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001  # however it says no
        return False
    return True


def _digest(value: Any) -> str:
    """Of a batch: tensors and arrays by their bytes, containers by what they hold, the rest by its text."""
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_digest(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_digest, value))}]"
    return repr(value)
