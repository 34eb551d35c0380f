"""The DCP plug-in: `torch.distributed.checkpoint` as it is, on checkpoints that are complete, verified, or not there.

    dcp.save(state, storage_writer=samerun.dcp.Writer(path), planner=samerun.dcp.SavePlanner())
    dcp.load(state, storage_reader=samerun.dcp.Reader(path), planner=samerun.dcp.LoadPlanner())

Writer and Reader work with any planner; the planners add proofs that only a planner can give. `real_errors` turns
DCP's CheckpointException, which is no Exception, into the first failing rank's own error.
"""

from __future__ import annotations

from samerun.core.lazy import lazy_names

__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Writer", "real_errors"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "LoadPlanner": "load_planner",
        "Reader": "reader",
        "SavePlanner": "save_planner",
        "Writer": "writer",
        "real_errors": "failures",
    },
)
