"""The run: start (fresh, resume, fall back, refuse), the loop, saving at edges, stopping.

Public: `Run`.
"""

from samerun.run.run import Run

__all__ = ["Run"]
