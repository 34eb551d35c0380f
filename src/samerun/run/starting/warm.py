"""Warm start: a new run from the weights of another. Not a resume, and never called one.

Only weights and buffers come along; optimizer, schedule, counters, cursor and random streams begin anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samerun.checkpoint import Store
from samerun.errors import DamagedError, Refused, SchemaError, StorageError
from samerun.run.starting.announce import say
from samerun.state.model import Buffers, Weights
from samerun.step.parts import by_name


def warm_start(path: str | Path, *, model: Any) -> str:
    """Loads weights and buffers of the newest sound checkpoint of the run at `path` into `model`, in place.

    `model` may be wrapped (DDP, FSDP2) and on any number of ranks; each reads what it needs, verified. Returns the
    checkpoint's name. Call it before `Run`, with another path there. Raises Refused when nothing can be loaded,
    MismatchError when names, shapes or dtypes differ. Buffers that differed between ranks come from rank 0.
    """
    models = by_name(model)
    store = Store(path)
    reasons = []
    for entry in store.catalog().entries:
        try:
            with store.open(entry) as checkpoint:
                for component in (Weights(models), Buffers(models)):
                    component.restore(checkpoint.source(component.name))
        except (DamagedError, SchemaError, StorageError) as error:
            reasons.append(f"{entry.name}: {error}")
            say(f"warm start: not taken: {reasons[-1]}")
            continue
        return entry.name
    why = "; ".join(reasons) or "there is no complete checkpoint"
    raise Refused(f"cannot warm-start from {path}: {why}")
