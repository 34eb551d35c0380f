"""One window: the safe update, in the one right order. Draws nothing, stores nothing, decides alike on every rank.

Public: `Step` for people who keep their own loop, and the modules `schedule` (learning rates on a named clock),
`recompute` (activation checkpointing), `noise` (gradient noise scale). Loaded on first use.
"""

from __future__ import annotations

from samerun.core.lazy import lazy_names

__all__ = ["Outcome", "Reason", "SkipRate", "Step", "noise", "recompute", "schedule"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Outcome": "outcome",
        "Reason": "outcome",
        "SkipRate": "skip_rate",
        "Step": "loop",
    },
    modules=("schedule", "recompute", "noise"),
)
