"""Who decides about incidents in an attempt that begins: rank 0, in the modes that write decisions."""

from __future__ import annotations

from samerun.checkpoint.retired import announce
from samerun.health.options import Mode
from samerun.health.rollback.good import margin
from samerun.run.acting import Actor, Place
from samerun.run.attempt import Parts
from samerun.run.config import RunConfig
from samerun.run.starting.announce import say
from samerun.run.starting.start import Started
from samerun.storage.api import Storage


def actor_of(parts: Parts, place: Storage, started: Started) -> Actor | None:
    """Rank 0's; None elsewhere, and where nothing is decided. An attempt that may rewind says so first."""
    options, source = parts.config.health, parts.config.source
    if not options.decides or parts.group.rank != 0:
        return None
    can_skip = hasattr(source, "skip")
    if options.mode is Mode.ACT:
        announce(place, started.attempt)
    around = Place(
        storage=place,
        store=parts.store,
        attempt=started.attempt,
        passed_over=lambda: [(int(a), int(b)) for a, b in source.state_dict().get("skip", ())] if can_skip else [],
        can_skip=can_skip,
        margin=margin(_beta2(parts.config)) if options.margin is None else options.margin,
        at=parts.faults.at,
        tell=say,
        clock=parts.clock,
    )
    return Actor(around, options)


def _beta2(config: RunConfig) -> float | None:
    """The longest memory of a second moment among the optimizers."""
    groups = [group for optimizer in config.optimizers.values() for group in optimizer.param_groups]
    return max((float(group["betas"][1]) for group in groups if "betas" in group), default=None)
