"""From a configuration to a started attempt: topology, group, components, the start decision. Collective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samerun.checkpoint import Store
from samerun.core import environ
from samerun.core.clock import SystemClock
from samerun.core.component import COMPONENTS, Component
from samerun.core.events import Journal
from samerun.data.source import Replica
from samerun.preempt.flag import StopFlag
from samerun.ranks.group import Group, Solo
from samerun.ranks.topology import Topology, topology_of
from samerun.ranks.torch_group import TorchGroup
from samerun.run.announce import describe, say
from samerun.run.attempt import Attempt, Live, Parts
from samerun.run.config import RunConfig
from samerun.run.faults import FaultPlan, FaultPoints, PlannedFiles
from samerun.run.identity import model_identity, optimizer_identity, scheduler_identity, user_identity
from samerun.run.start import Started, StartKind, start
from samerun.run.surroundings import surroundings, why_not_bitwise
from samerun.run.trace import Trace
from samerun.state.extra import Extra
from samerun.state.model import Buffers, Weights
from samerun.state.optimizer import OptimizerMemory
from samerun.state.record import Record
from samerun.state.rng import Rng, preserved_rng
from samerun.state.schedule import Schedule
from samerun.step.engine import Engine
from samerun.step.parallel.sync import settle_bucket_order
from samerun.step.precision import Precision
from samerun.step.schedule import lr_setters
from samerun.storage.api import Storage
from samerun.storage.journal import StoredJournal
from samerun.storage.local import Local
from samerun.storage.opening import is_url, open_storage


def open_attempt(config: RunConfig, stop: StopFlag) -> Attempt:
    """Raises Refused before anything is touched, or returns a started attempt that stands at its first edge."""
    launcher = environ.launcher()
    topology = topology_of(config.models.values(), mesh=config.mesh, launcher=launcher)
    group: Group = Solo() if topology.world_size == 1 else TorchGroup()
    plan = FaultPlan.parse(environ.fault_plan_text())
    live = Live()
    faults = FaultPoints(plan, rank=group.rank, window=lambda: int(live.progress.windows))
    engine = Engine(
        models=config.models,
        optimizers=config.optimizers,
        topology=topology,
        options=config.step,
        before_update=lr_setters(config.schedulers, config.optimizers, lambda: live.progress),
    )
    live.losses.noise = engine.noise
    identity = _identity(config)
    with preserved_rng():
        settle_bucket_order(config.models)
    config.source.attach(Replica(index=topology.replica, count=topology.num_replicas))
    components = _components(config, engine, live)
    facts = {"topology": _topology_facts(topology), "surroundings": surroundings(engine.device)}
    place = _place(config.path, plan, faults)
    store = Store(place, group=group, keep_last=config.keep_last, at=faults.at)
    faults.at("load")
    waive = (*config.waive, *plan.leave_out)
    started = start(
        store,
        group,
        identity=identity,
        components=components,
        waive=waive,
        facts=facts,
        changeable=[f"data.{name}" for name in getattr(config.source, "changeable", ())],
    )
    live.progress = started.progress
    parts = Parts(
        config=config,
        topology=topology,
        group=group,
        store=store,
        engine=engine,
        components=components,
        live=live,
        facts=facts,
        launcher=launcher,
        clock=SystemClock(),
        stop=stop,
        faults=faults,
    )
    attempt = Attempt(parts, started, journal=_journal(config, started, group), trace=_trace(plan, started, group))
    if started.kind is not StartKind.FRESH:
        attempt.trace.restored(live.progress, components, started.saved_digests)
    _announce(attempt, config, topology, facts, lead=group.rank == 0)
    return attempt


def _components(config: RunConfig, engine: Engine, live: Live) -> list[Component]:
    """In the order of restoring: streams last, since restoring anything else may draw."""
    own: list[Component] = [
        Weights(config.models),
        Buffers(config.models),
        OptimizerMemory(config.optimizers, config.models, steps=False),
        OptimizerMemory(config.optimizers, config.models, steps=True),
        Schedule(config.optimizers, config.schedulers, config.models),
        Record("cursor", config.source.state_dict, config.source.load_state_dict),
        Record("samples", live.coverage.read, live.coverage.write),
        Record("loss", live.losses.read, live.losses.write),
        *(Extra(name, value) for name, value in config.extra.items()),
        Rng(),
    ]
    if config.step.precision is Precision.FP16:
        own.append(Record("scaler", engine.scaler_state, engine.load_scaler_state))
    order = {name: position for position, name in enumerate(COMPONENTS)}
    return sorted(own, key=lambda component: order.get(component.name, order["ema"]))


def _identity(config: RunConfig) -> dict[str, Any]:
    return {
        "model": model_identity(config.models),
        "data": config.source.identity(),
        "optimizer": {name: optimizer_identity(optimizer) for name, optimizer in config.optimizers.items()},
        "scheduler": {name: scheduler_identity(scheduler) for name, scheduler in config.schedulers.items()},
        "step": config.step.identity(),
        "user": user_identity(config.identity),
    }


def _topology_facts(topology: Topology) -> dict[str, Any]:
    return {
        "world_size": topology.world_size,
        "num_replicas": topology.num_replicas,
        "wrapping": topology.wrapping.value,
    }


def _journal(config: RunConfig, started: Started, group: Group) -> Journal:
    if group.rank != 0:
        return Journal(None)
    if is_url(config.path):
        return StoredJournal(open_storage(config.path), started.attempt)
    return Journal(Path(config.path) / "journal" / f"{started.attempt:06d}.jsonl")


def _place(path: str, plan: FaultPlan, faults: FaultPoints) -> Storage:
    """Where the run lives. Planned faults of files are for directories; an object store has none."""
    if plan.faults and not is_url(path):
        return Local(path, files=PlannedFiles(faults))
    return open_storage(path)


def _trace(plan: FaultPlan, started: Started, group: Group) -> Trace:
    return Trace(plan.trace, attempt=started.attempt, rank=group.rank)


def _announce(attempt: Attempt, config: RunConfig, topology: Topology, facts: Mapping[str, Any], *, lead: bool) -> None:
    started = attempt.started
    not_bitwise: list[str] = []
    if started.kind is not StartKind.FRESH:
        not_bitwise = why_not_bitwise(started.saved_facts["surroundings"], facts["surroundings"])
        before = started.saved_facts["topology"]
        if before != facts["topology"]:
            not_bitwise.append(
                f"topology was {before}, is {facts['topology']}; random streams are derived, buffers rank 0's"
            )
    decision = getattr(config.source, "decision", None)
    data_policy = None if decision is None else f"{decision.policy.value}: {decision.reason}"
    if lead:
        for line in describe(
            started, path=config.path, topology=str(topology), not_bitwise=not_bitwise, data=data_policy
        ):
            say(line)
    attempt.journal.write(
        "started",
        sync=True,
        kind=started.kind.value,
        attempt=started.attempt,
        checkpoint=started.checkpoint,
        progress=started.progress.to_json(),
        passed=[str(passed) for passed in started.passed],
        restored=list(started.restored),
        waived=list(started.waived),
        not_bitwise=not_bitwise,
        data=data_policy,
        facts=dict(facts),
    )
