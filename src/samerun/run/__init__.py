"""The run: start (fresh, resume, fall back, refuse), the loop, saving at edges, stopping.

Public: `Run`, `warm_start`.
"""

from samerun.run.run import Run
from samerun.run.starting.warm import warm_start

__all__ = ["Run", "warm_start"]
