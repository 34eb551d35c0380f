"""What a run notices about itself: records of every window, detectors over them, and bounded decisions.

Detectors and policies are pure functions and small state machines over records; they import no torch. Whoever runs a
training feeds them and executes what they decide, after writing the decision down. Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_HOME: Final[dict[str, str]] = {
    "DecisionRecord": "rollback.decisions", "FlightRecorder": "records.flight", "HealthOptions": "options",
    "JsonlSink": "sinks", "Mode": "options", "RecordWriter": "records.writer", "Sink": "sinks",
    "SpikeDetector": "spike.detector", "TensorBoardSink": "sinks", "WindowRecord": "records.event",
    "decide": "rollback.ladder", "find_non_finite": "nonfinite", "quarantine": "rollback.quarantine",
    "read_decisions": "rollback.decisions", "read_records": "records.event", "run_canary": "corruption.canary",
    "straggler": "straggler.score",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"samerun.health.{_HOME[name]}"), name)
    raise AttributeError(f"module 'samerun.health' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
