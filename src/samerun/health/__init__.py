"""What a run notices about itself: records of every window, detectors over them, and bounded decisions.

Detectors and policies are pure functions and small state machines over records; they import no torch. Whoever runs a
training feeds them and executes what they decide, after writing the decision down. Names load on first use.
"""

from __future__ import annotations

from samerun.core.lazy import lazy_names

__all__ = [
    "DecisionRecord", "FlightRecorder", "HealthOptions", "JsonlSink", "Mode", "RecordWriter", "Sink",
    "SpikeDetector", "TensorBoardSink", "WindowRecord", "decide", "find_non_finite", "quarantine",
    "read_decisions", "read_records", "run_canary", "straggler",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DecisionRecord": "rollback.decisions", "FlightRecorder": "records.flight", "HealthOptions": "options",
        "JsonlSink": "sinks", "Mode": "options", "RecordWriter": "records.writer", "Sink": "sinks",
        "SpikeDetector": "spike.detector", "TensorBoardSink": "sinks", "WindowRecord": "records.event",
        "decide": "rollback.ladder", "find_non_finite": "nonfinite", "quarantine": "rollback.quarantine",
        "read_decisions": "rollback.decisions", "read_records": "records.event", "run_canary": "corruption.canary",
        "straggler": "straggler.score",
    },
)  # fmt: skip
