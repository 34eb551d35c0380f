"""Does a stop fit into the warning, and what may be saved when it does not?

python examples/exercise_preemption_budget.py

A warning must hold what is left of the window, the save until it is durable, and a margin. A save of 90 s fills a
warning of 90 s by itself, so it does not fit: there is always something else to do. The second part is the choice at a
notice in the middle of a window: finish it, or drop it. Weights from before the window with a cursor inside it are
neither: those samples would be lost in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

from samerun.plan import PreemptPlan, plan_preempt
from samerun.plan.availability.deadline import Link, Path

UPDATE, MICROBATCHES, MICRO_BATCH, REPLICAS = 1840, 8, 2, 4
GLOBAL_BATCH = MICROBATCHES * MICRO_BATCH * REPLICAS


def budget(warning: float, *, window: float, save: float, margin: float) -> PreemptPlan:
    """All in seconds, at the slow end of what was measured."""
    path = Path(window_seconds=window, save_seconds=save, notice_seconds=0.0, margin_seconds=margin)
    return plan_preempt((Link(name="warning", warning_seconds=warning),), path)


def saving_share(interval: float, save: float) -> float:
    """The share of the wall clock that blocking saves take: s / (P + s)."""
    return save / (interval + save)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Where a run goes on after a notice in the middle of window `UPDATE`."""

    update: int
    samples: int

    @property
    def is_one_boundary(self) -> bool:
        """Whether weights and cursor belong to the same update; here every update took one global batch."""
        return self.samples == self.update * GLOBAL_BATCH


def finished() -> Restart:
    return Restart(update=UPDATE + 1, samples=(UPDATE + 1) * GLOBAL_BATCH)


def dropped() -> Restart:
    return Restart(update=UPDATE, samples=UPDATE * GLOBAL_BATCH)


def mixed(microbatches_done: int) -> Restart:
    """The mistake: old weights, and a cursor that had moved on."""
    return Restart(update=UPDATE, samples=UPDATE * GLOBAL_BATCH + microbatches_done * MICRO_BATCH * REPLICAS)


def main() -> None:
    print("warning  window  save  margin  verdict")
    for warning, window, save, margin in ((120, 12, 90, 10), (105, 12, 90, 10), (90, 12, 90, 10), (90, 1, 90, 1)):
        plan = budget(warning, window=window, save=save, margin=margin)
        short = f", {plan.short_seconds:g} s short" if plan.short_seconds else ""
        print(f"{warning:5d} s  {window:4d} s  {save:2d} s  {margin:4d} s  {plan.verdict.value}{short}")
    for minutes in (5, 20):
        print(f"a blocking save of 90 s after every {minutes} min of work takes {saving_share(minutes * 60, 90):.1%}")
    print(f"notice after microbatch 5 of {MICROBATCHES} of the window that follows update {UPDATE}:")
    for name, restart in (("finish the window", finished()), ("drop it", dropped()), ("mix them", mixed(5))):
        verdict = "one boundary" if restart.is_one_boundary else "WRONG: samples lost in silence"
        print(f"  {name:17s}  update {restart.update}, {restart.samples:,} samples: {verdict}")


if __name__ == "__main__":
    main()
