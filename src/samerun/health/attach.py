"""Between a run and its monitor: the run's parts in the terms of health. The one place that knows both."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from samerun.checkpoint import Store
from samerun.checkpoint.retired import read_retirements
from samerun.core.events import Journal
from samerun.data.source import DataWindow
from samerun.errors import Refused, SamerunError
from samerun.health.corruption.checksum import Checksum, checksums
from samerun.health.corruption.looking import Lookout
from samerun.health.corruption.replaying import Replayer
from samerun.health.counters import CounterWatch, open_counters
from samerun.health.monitor import Decided, Decider, Monitor, Surroundings
from samerun.health.nonfinite import InputKeeper
from samerun.health.options import HealthOptions
from samerun.health.rollback import past
from samerun.health.rollback.decisions import apply_quarantine, quarantined, read_decisions
from samerun.health.spike.detector import SpikeDetector
from samerun.ranks.group import Group
from samerun.ranks.topology import Wrapping
from samerun.step.engine import Engine
from samerun.step.outcome import Decision, Reason
from samerun.storage.api import Storage
from samerun.storage.opening import is_url

_RSS_UNIT_BYTES = 1024 if platform.system() == "Linux" else 1


def monitor_of(
    options: HealthOptions,
    *,
    engine: Engine,
    store: Store,
    begun: tuple[int, int],
    group: Group,
    spikes: SpikeDetector,
    optimizers: Mapping[str, torch.optim.Optimizer],
    journal: Journal,
    tell: Callable[[str], None],
    decider: Decider | None,
) -> Monitor:
    """For an attempt that has just `begun`: its number, and the windows decided before it.

    A run on an object store keeps its records in memory only.
    """
    attempt = begun[0]
    wrapping = engine.topology.wrapping
    whole = wrapping in (Wrapping.SOLO, Wrapping.DDP)
    is_cuda = engine.device.type == "cuda"
    around = Surroundings(
        folder=None if is_url(store.path) else Path(store.path) / "health" / f"{attempt:06d}",
        attempt=attempt,
        group=group,
        journal=journal,
        tell=tell,
        is_separable=whole,
        span=DeviceSpan() if is_cuda else None,
        memory_bytes=_device_bytes if is_cuda else _host_bytes,
        keeper=InputKeeper(engine.models) if whole else None,
        lookout=_lookout(engine, group) if whole else None,
        counters=_counters(engine.device),
        replicated=list(engine.models.values()) if wrapping is Wrapping.DDP else (),
        autocast=lambda: engine.options.precision.autocast(engine.device),
        checksums=(lambda: replicated_checksums(engine.models, optimizers)) if wrapping is Wrapping.DDP else None,
        decider=decider,
        options=options,
        begun_at=begun[1],
        facts={"host": platform.node(), "pid": os.getpid(), "device": str(engine.device)},
    )
    return Monitor(around, spikes)


def _counters(device: torch.device) -> CounterWatch | None:
    counters = open_counters(torch.cuda.current_device()) if device.type == "cuda" else None
    return None if counters is None else CounterWatch(counters)


def _lookout(engine: Engine, group: Group) -> Lookout:
    replayer = Replayer(engine.models, lambda: engine.options.precision.autocast(engine.device))
    return Lookout(replayer, group, engine.device, deterministic=torch.are_deterministic_algorithms_enabled())


def decided_of(data: DataWindow, decision: Decision) -> Decided:
    """With several optimizers: the last one's, as for the window's loss."""
    last = list(decision.outcomes.values())[-1]
    return Decided(
        window=data.index,
        start=data.start,
        end=data.end,
        coverage=decision.agreed.coverage,
        samples=decision.agreed.num_samples,
        weight=decision.weight,
        loss=decision.loss,
        grad_norm=last.grad_norm,
        lr=last.lr,
        scale=last.scale,
        outcome="updated" if decision.updated else last.reason.value,
        is_loss_bad=any(outcome.reason is Reason.NON_FINITE_LOSS for outcome in decision.outcomes.values()),
    )


def pass_over_quarantined(source: Any, place: Storage, group: Group) -> list[tuple[int, int]]:
    """Applies the run's quarantined ranges to `source`, the same on every rank; returns what was added. Collective.

    Raises Refused when the decisions cannot be read or the source cannot skip: going on would train on what was ruled
    out.
    """
    answer: dict[str, Any] = {}
    if group.rank == 0:
        try:
            carried_out = {one.decision: one.attempt for one in read_retirements(place) if one.target is not None}
            ruled = past.in_force(read_decisions(place), carried_out)
            answer = {"ranges": [list(pair) for pair in quarantined(ruled)]}
        except SamerunError as error:
            answer = {"error": str(error)}
    answer = group.broadcast(answer)
    if "error" in answer:
        raise Refused(f"the run's recorded decisions cannot be read: {answer['error']}")
    try:
        return apply_quarantine(source, [(start, stop) for start, stop in answer["ranges"]])
    except SamerunError as error:
        raise Refused(f"a quarantined range cannot be passed over: {error}") from error


def replicated_checksums(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Checksum]:
    """Of parameters and optimizer memory, which every DDP replica holds alike; buffers are each rank's own."""
    tensors: dict[str, torch.Tensor] = {}
    for model_name, model in models.items():
        tensors |= {f"{model_name}.{name}": parameter for name, parameter in model.named_parameters()}
    for name, optimizer in optimizers.items():
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for position, parameter in enumerate(trained):
            memory: Mapping[str, Any] = optimizer.state.get(parameter, {})
            tensors |= {
                f"{name}.{position}.{key}": value for key, value in memory.items() if isinstance(value, torch.Tensor)
            }
    return checksums(tensors)


class DeviceSpan:
    """The same two spans on the device's own clock: a host that only launches kernels sees nothing of them."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        self._marked = False

    def begin(self) -> None:
        self._events[0].record()
        self._marked = False

    def mark(self) -> None:
        self._events[1].record()
        self._marked = True

    def seconds(self) -> tuple[float, float] | None:
        """(until the mark, from there on); None where nothing was marked. Waits for the device, which has decided."""
        if not self._marked:
            return None
        self._events[2].record()
        self._events[2].synchronize()
        first, marked, last = self._events
        return first.elapsed_time(marked) / 1e3, marked.elapsed_time(last) / 1e3


def _host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES


def _device_bytes() -> int:
    return torch.cuda.max_memory_allocated()
