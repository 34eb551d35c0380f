"""The position in the global order: produced ≥ delivered ≥ committed, of which only `committed` is ever saved.

What a prefetch queue holds, or a loop has seen but not finished, is read again after a resume: counting it would lose
samples. The state is the same on every rank, says nothing of ranks or workers, and stays under 1 KiB.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from samerun.core.choice import whole_number
from samerun.data.coverage import MASK, add_coverage
from samerun.data.elastic import CHANGEABLE, Decision, Policy, Share, accepted, decide, parse_policy
from samerun.data.order import MAX_SAMPLES, ORDER_VERSION, Order
from samerun.data.source import DataWindow, Guarantee, Replica
from samerun.data.windows import EpochEnd, MicroBatchPlan, SkipRanges, Windowing, WindowPlan, parse_skip
from samerun.errors import UsageError

SCHEMA: Final = "ckpt.data.v1"
_MAX_SEED: Final = 2**63 - 1
_REMEMBERED_WINDOWS: Final = 128
_SAMPLES_AT_ONCE: Final = 2048
"""Looked up in one go: a lookup costs as much as a few hundred samples, a small window's included."""
_WINDOWS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Three positions in the global order, as one replica sees them."""

    produced: int
    """End of what was asked of the loader."""
    delivered: int
    """End of what the training loop was given."""
    committed: int
    """End of the last decided window: what a checkpoint holds."""


class Cursor:
    """One source's windows and how far they are decided. Shared by a sampler and the source that serves it."""

    def __init__(self, windowing: Windowing, *, fingerprint: str, on_change: Policy = Policy.EXACT) -> None:
        self.windowing = windowing
        self.fingerprint = fingerprint
        self.on_change = on_change
        self.decision: Decision | None = None
        self.replica = Replica()
        self.began = False
        self._position = 0
        self._windows = 0
        self._samples = 0
        self._coverage = 0
        self._changes: tuple[tuple[int, int, int], ...] = ()
        self._produced = 0
        self._delivered = 0
        self._plans: dict[int, WindowPlan] = {}
        self._on_the_way: dict[int, dict[int, MicroBatchPlan]] = {}
        """Window → number → what was asked of a loader and not delivered yet."""

    @property
    def windows(self) -> int:
        """Decided windows, which is also the index of the next undecided one."""
        return self._windows

    @property
    def positions(self) -> Positions:
        committed = self._position
        delivered = max(self._delivered, committed)
        return Positions(produced=max(self._produced, delivered), delivered=delivered, committed=committed)

    def attach(self, replica: Replica) -> None:
        self.windowing.check_replica(replica)
        if self.began and replica != self.replica:
            raise UsageError(
                f"this source is already being iterated as replica {self.replica.index} of {self.replica.count}; "
                f"attach({replica.index} of {replica.count}) must come before windows()"
            )
        self.replica = replica

    def restart(self) -> None:
        """Iteration is over: what was produced or delivered but not committed will be produced again."""
        self.began = False
        self._produced = self._delivered = self._position
        self._plans.clear()
        self._on_the_way.clear()

    def plan(self, index: int, start: int) -> WindowPlan:
        """Window `index`, which begins at `start`; remembered, since a loader and its reader both ask for it."""
        plan = self._plans.get(index)
        if plan is None:
            count = min(_WINDOWS_AT_ONCE, max(1, _SAMPLES_AT_ONCE // self.windowing.global_batch))
            for plan in self.windowing.windows(index=index, start=start, count=count):
                self._plans[plan.index] = plan
            while len(self._plans) > _REMEMBERED_WINDOWS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[index]
        return plan

    def own_microbatches(self) -> Iterator[MicroBatchPlan]:
        """This replica's microbatches from the committed cursor on, without end. Marks what it yields as produced."""
        self.began = True
        index, start = self._windows, self._position
        while True:
            plan = self.plan(index, start)
            for number in self.replica.numbers(plan.num_microbatches):
                part = plan.microbatch(number)
                self._produced = part.end
                if index >= self._windows:
                    self._on_the_way.setdefault(index, {})[number] = part
                yield part
            index, start = index + 1, plan.end

    def delivered(self, window: int, number: int) -> MicroBatchPlan:
        """The loop was given this microbatch; returns what was asked for."""
        part = self._on_the_way[window].pop(number)
        self._delivered = part.end
        return part

    def commit(self, window: DataWindow | None = None) -> None:
        """Moves the cursor over the next undecided window; `window`, when given, must be that one."""
        plan = self.plan(self._windows, self._position)
        if window is not None and (window.index, window.start, window.end) != (plan.index, plan.start, plan.end):
            raise UsageError(
                f"commit() got window {window.index}, positions [{window.start}, {window.end}); the next undecided "
                f"window is {plan.index}, positions [{plan.start}, {plan.end}). Commit each window once, in order"
            )
        self._plans.pop(plan.index, None)
        self._on_the_way.pop(plan.index, None)
        self._position = plan.end
        self._windows += 1
        self._samples += plan.num_samples
        self._coverage = add_coverage(self._coverage, plan.coverage)

    def skip(self, start: int, stop: int) -> None:
        """Adds one skip range ahead of the cursor."""
        if self.began:
            raise UsageError(f"skip({start}, {stop}) while the data is being iterated; close() the source first")
        added = parse_skip([(start, stop)])
        if start < self._position:
            raise UsageError(
                f"skip range ({start}, {stop}) begins before position {self._position}, already trained on"
            )
        self.windowing = replace(self.windowing, skip=self.windowing.skip.merged(added))
        self._plans.clear()

    @property
    def changeable(self) -> frozenset[str]:
        """Names in `identity()` whose change `load_state_dict` itself decides on, because the user allowed it."""
        return CHANGEABLE if self.on_change is Policy.REBATCH else frozenset()

    def identity(self) -> dict[str, Any]:
        windowing = self.windowing
        return {
            "order": ORDER_VERSION,
            "num_samples": windowing.order.num_samples,
            "fingerprint": self.fingerprint,
            "seed": windowing.order.seed,
            "global_batch": windowing.global_batch,
            "micro_batch": windowing.micro_batch,
            "epoch_end": windowing.epoch_end.value,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "unit": "sample",
            "position": self._position,
            "windows": self._windows,
            "samples": self._samples,
            "coverage": f"{self._coverage:016x}",
            "skip": [list(pair) for pair in self.windowing.skip.ranges],
            "changes": [list(change) for change in self._changes],
            **self.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.began:
            raise UsageError(
                "the data was already iterated when its state arrived: samples were read from the wrong position. "
                "Call load_state_dict() before windows() or iter(), or close() the source first"
            )
        loaded = _read_state(state, self.identity())
        decision = accepted(self._decide(state, loaded.position))
        self.windowing = replace(self.windowing, skip=_resumed_skip(self.windowing.skip, loaded.skip, loaded.position))
        self._position, self._windows = loaded.position, loaded.windows
        self._samples, self._coverage = loaded.samples, loaded.coverage
        self._changes = loaded.changes
        if decision.policy is Policy.REBATCH:
            self._changes += ((loaded.position, state["global_batch"], state["micro_batch"]),)
        self.decision = decision
        self.restart()

    def _decide(self, state: dict[str, Any], position: int) -> Decision:
        def share(identity: dict[str, Any]) -> Share:
            # one order for all: the replica count never enters
            return Share(guarantee=Guarantee.EXACT, replicas=1, shared=True, identity=identity)

        identity = self.identity()
        saved = {name: state[name] for name in identity}
        return decide(share(saved), share(identity), position=position, allowed={self.on_change})


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    position: int
    windows: int
    samples: int
    coverage: int
    skip: SkipRanges
    changes: tuple[tuple[int, int, int], ...]


def _read_state(state: Any, expected: dict[str, Any]) -> _State:
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        found = state.get("schema") if isinstance(state, dict) else type(state).__name__
        raise UsageError(f"the data state has schema {found!r}, this source reads {SCHEMA!r}")
    wanted = {"schema", "unit", "position", "windows", "samples", "coverage", "skip", "changes", *expected}
    if set(state) != wanted:
        raise UsageError(f"the data state has the keys {sorted(state)}, expected {sorted(wanted)}")
    if state["unit"] != "sample":
        raise UsageError(f"the data state counts in {state['unit']!r}, this source counts in 'sample'")
    return _numbers(state)


def _numbers(state: dict[str, Any]) -> _State:
    for name in ("position", "windows", "samples"):
        value = state[name]
        if type(value) is not int or not 0 <= value <= MAX_SAMPLES:
            raise UsageError(f"the data state has {name}={value!r}, expected a whole number from 0 to {MAX_SAMPLES}")
    try:
        coverage = int(state["coverage"], 16)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the data state has coverage={state['coverage']!r}, expected 16 hex digits") from error
    skip = parse_skip(state["skip"] if isinstance(state["skip"], list) else [state["skip"]])
    if skip.kept_before(state["position"]) != state["samples"] or not 0 <= coverage <= MASK:
        raise UsageError(
            f"the data state contradicts itself: position {state['position']} with skip ranges {list(skip.ranges)} "
            f"means {skip.kept_before(state['position'])} samples, it says {state['samples']}"
        )
    return _State(
        position=state["position"],
        windows=state["windows"],
        samples=state["samples"],
        coverage=coverage,
        skip=skip,
        changes=_changes(state["changes"]),
    )


def _changes(value: Any) -> tuple[tuple[int, int, int], ...]:
    rows = value if isinstance(value, list) else [value]
    for row in rows:
        if not (isinstance(row, list) and len(row) == 3 and all(type(number) is int and number >= 0 for number in row)):
            raise UsageError(f"the data state has the change {row!r}, expected [position, global_batch, micro_batch]")
    return tuple(tuple(row) for row in rows)


def _resumed_skip(asked: SkipRanges, saved: SkipRanges, position: int) -> SkipRanges:
    """Saved ranges stay; new ones may only lie ahead of the cursor."""
    merged = saved.merged(asked)
    if merged.before(position) != saved.before(position):
        raise UsageError(
            f"skip ranges {list(asked.ranges)} reach below position {position}, which was already trained on with "
            f"{list(saved.before(position))} skipped; a new range must start at {position} or later"
        )
    return merged


def make_cursor(
    num_samples: int, *, global_batch: int, micro_batch: int, seed: int, epoch_end: str | EpochEnd,
    skip: Iterable[Any] = (), fingerprint: str = "", on_change: str | Policy = Policy.EXACT,
) -> Cursor:  # fmt: skip
    """A cursor at position 0 from a user's arguments; raises UsageError naming the argument that cannot be."""
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("seed", seed)):
        whole_number(value, option=name, at_least=-_MAX_SEED if name == "seed" else 1)
    if not 0 < num_samples <= MAX_SAMPLES:
        raise UsageError(f"the dataset has {num_samples} samples; 1 … {MAX_SAMPLES} can be trained on")
    if not -_MAX_SEED <= seed <= _MAX_SEED:
        raise UsageError(f"seed={seed} does not fit 64 bits; choose one between ±{_MAX_SEED}")
    windowing = Windowing(
        order=Order(num_samples=num_samples, seed=operator.index(seed)),
        global_batch=operator.index(global_batch),
        micro_batch=operator.index(micro_batch),
        epoch_end=EpochEnd.parse(epoch_end, option="epoch_end"),
        skip=parse_skip(skip),
    )
    policy = parse_policy(on_change, offered=(Policy.EXACT, Policy.REBATCH))
    return Cursor(windowing, fingerprint=fingerprint, on_change=policy)
