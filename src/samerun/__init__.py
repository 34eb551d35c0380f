"""samerun: a PyTorch training run that stops comes back as the same run, and you can prove it.

Names are loaded on first use, so importing this package has no effects and costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samerun.core.lazy import lazy_names

if TYPE_CHECKING:
    from samerun.convert.run_export import export
    from samerun.data import Data
    from samerun.run import Run, warm_start
    from samerun.state.rng import seed_all

__all__ = [
    "Data", "Run", "checkpoint", "data", "dcp", "export", "health", "lessons", "plan", "preempt", "seed_all", "step",
    "warm_start",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Data": "data",
        "Run": "run",
        "export": "convert.run_export",
        "seed_all": "state.rng",
        "warm_start": "run",
    },
    modules=("checkpoint", "data", "dcp", "health", "lessons", "plan", "preempt", "step"),
)

__version__ = "0.1.0"
