"""The DCP plug-in: `torch.distributed.checkpoint` as it is, on checkpoints that are complete, verified, or not there.

    dcp.save(state, storage_writer=samerun.dcp.Writer(path), planner=samerun.dcp.SavePlanner())
    dcp.load(state, storage_reader=samerun.dcp.Reader(path), planner=samerun.dcp.LoadPlanner())

Writer and Reader work with any planner; the planners add proofs that only a planner can give. `real_errors` turns
DCP's CheckpointException, which is no Exception, into the first failing rank's own error.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "LoadPlanner": "samerun.dcp.load_planner",
    "Reader": "samerun.dcp.reader",
    "SavePlanner": "samerun.dcp.save_planner",
    "Writer": "samerun.dcp.writer",
    "real_errors": "samerun.dcp.failures",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'samerun.dcp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
