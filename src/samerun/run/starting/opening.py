"""From a configuration to a started attempt: topology, group, components, the start decision. Collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from samerun.checkpoint import Store
from samerun.core import environ
from samerun.core.clock import SystemClock
from samerun.core.component import COMPONENTS, Component
from samerun.core.environ import Launcher
from samerun.core.events import Journal
from samerun.core.machine import resident_bytes
from samerun.data.source import Replica
from samerun.errors import UsageError
from samerun.health.attach import monitor_of, pass_over_quarantined
from samerun.health.monitor import Monitor
from samerun.health.spike.detector import SpikeDetector
from samerun.plan.record import to_json
from samerun.preempt.flag import StopFlag
from samerun.preempt.votes import Votes
from samerun.ranks.board import SoloBoard, board_of_default_group
from samerun.ranks.group import Group, Solo
from samerun.ranks.topology import Topology, topology_of
from samerun.ranks.torch_group import TorchGroup, meet
from samerun.run.acting import Actor
from samerun.run.attempt import Attempt, Live, Parts
from samerun.run.config import RunConfig, SaveOptions
from samerun.run.ending import last_words
from samerun.run.faults import FaultPlan, FaultPoints, PlannedFiles
from samerun.run.starting.announce import announce, recall, say
from samerun.run.starting.deciding import actor_of
from samerun.run.starting.identity import identity_of
from samerun.run.starting.loads import Journals
from samerun.run.starting.remap import changeable, remap_schedules
from samerun.run.starting.rewinds import settle_rewinds
from samerun.run.starting.start import Started, StartKind, start
from samerun.run.starting.surroundings import surroundings
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
from samerun.storage.local import Local
from samerun.storage.opening import is_url, open_storage


def open_attempt(config: RunConfig, stop: StopFlag) -> Attempt:
    """Raises Refused before anything is touched, or returns a started attempt that stands at its first edge."""
    launcher = environ.launcher()
    topology = topology_of(config.models.values(), mesh=config.mesh, launcher=launcher)
    groups = _Groups(topology, config)
    try:
        return _open(config, stop, launcher, topology, groups)
    except BaseException:
        groups.close()
        raise


class _Groups:
    """One for the run's own questions, one for the thread of its background saves. Collective to construct."""

    def __init__(self, topology: Topology, config: RunConfig) -> None:
        make: Callable[[], Group] = Solo if topology.world_size == 1 else TorchGroup
        if topology.world_size > 1:
            meet(config.parts.device)
        self.main = make()
        self.background = make() if config.saves.background else None

    def close(self) -> None:
        self.main.close()
        if self.background is not None:
            self.background.close()


def _open(config: RunConfig, stop: StopFlag, launcher: Launcher, topology: Topology, groups: _Groups) -> Attempt:
    group = groups.main
    plan = FaultPlan.parse(environ.fault_plan_text())
    config = replace(config, health=config.health.overridden(plan.health))
    live = Live()
    faults = FaultPoints(plan, rank=group.rank, window=lambda: int(live.progress.windows))
    engine = _engine(config, topology, live)
    live.losses.noise = engine.noise
    live.losses.spikes = None if config.health.is_off else SpikeDetector()
    identity = identity_of(config)
    with preserved_rng():
        settle_bucket_order(config.models)
    config.source.attach(Replica(index=topology.replica, count=topology.num_replicas))
    components = _components(config, engine, live)
    facts = _facts(config, topology, engine)
    place = _place(config.path, plan, faults)
    store = _store(place, groups, config.saves, faults)
    engine.fence, faults.settle = store.fence, store.wait
    faults.at("load")
    waive = (*config.waive, *plan.leave_out)
    if group.rank == 0:
        last_words.introduce(launcher, config.path)
    journals = Journals(config.path, writes=group.rank == 0)
    before = resident_bytes()
    started = start(
        store,
        group,
        identity=identity,
        components=components,
        waive=waive,
        facts=facts,
        changeable=changeable(config),
        load_tries=journals.load_tries,
        settle=lambda attempt: _settle(place, group, attempt),
    )
    _require_beginning(config, started, group)
    live.progress = started.progress
    remapped = remap_schedules(config, live.progress)
    parts = Parts(
        config=config,
        topology=topology,
        group=group,
        background=groups.background,
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
    attempt = _attempt(parts, started, place, journals.of(started.attempt), plan)
    if started.kind is not StartKind.FRESH:
        attempt.trace.restored(live.progress, components, started.saved_digests)
    _pass_over(attempt, config.source, place, group)
    announce(attempt, config, topology, facts, remapped, lead=group.rank == 0)
    attempt.journal.write("memory", ranks=group.gather([before, resident_bytes()]))  # before and after the restore
    recall(attempt, journals.earlier(started.attempt))
    return attempt


def _attempt(parts: Parts, started: Started, place: Storage, journal: Journal, plan: FaultPlan) -> Attempt:
    actor = actor_of(parts, place, started)
    return Attempt(
        parts,
        started,
        journal=journal,
        trace=Trace(plan.trace, attempt=started.attempt, rank=parts.group.rank),
        votes=_votes(parts, started),
        health=_health(parts, started, journal, actor),
        actor=actor,
    )


def _require_beginning(config: RunConfig, started: Started, group: Group) -> None:
    """A fresh run begins with its data's first sample. Collective. Raises UsageError on every rank."""
    if started.kind is not StartKind.FRESH:
        return
    for rank, number in enumerate(group.gather(int(getattr(config.source, "num_decided", 0)))):
        if number:
            raise UsageError(
                f"a fresh run begins at window 0 of its data, but what rank {rank} was given as data= has {number} "
                f"windows behind it, from another run or loop, and would leave their samples out: make a new object"
            )


def _settle(place: Storage, group: Group, attempt: int) -> None:
    for line in settle_rewinds(place, group, attempt):
        if group.rank == 0:
            say(line)


def _health(parts: Parts, started: Started, journal: Journal, actor: Actor | None) -> Monitor | None:
    spikes = parts.live.losses.spikes
    if spikes is None:
        return None
    monitor = monitor_of(
        parts.config.health,
        engine=parts.engine,
        store=parts.store,
        begun=(started.attempt, int(started.progress.windows)),
        group=parts.group,
        spikes=spikes,
        optimizers=parts.config.optimizers,
        journal=journal,
        tell=say,
        decider=actor,
    )
    parts.live.losses.settle = monitor.settle
    return monitor


def _votes(parts: Parts, started: Started) -> Votes | None:
    leads, prefix = parts.group.rank == 0, f"samerun/{started.run_id}/{started.attempt}/"
    board = SoloBoard() if parts.group.size == 1 else board_of_default_group(prefix=prefix)
    return None if board is None else Votes(board, parts.clock, leads=leads, say=say)


def _pass_over(attempt: Attempt, source: Any, place: Storage, group: Group) -> None:
    """What was quarantined by a recorded decision is never read again, whichever checkpoint a start begins from."""
    added = pass_over_quarantined(source, place, group)
    if added:
        attempt.journal.write("quarantine", ranges=[list(pair) for pair in added], sync=True)
        if attempt.leads:
            say(f"  quarantined samples are passed over: {', '.join(f'[{a}, {b})' for a, b in added)}")


def _engine(config: RunConfig, topology: Topology, live: Live) -> Engine:
    return Engine(
        models=config.models,
        optimizers=config.optimizers,
        topology=topology,
        options=config.step,
        before_update=lr_setters(config.schedulers, config.optimizers, lambda: live.progress),
    )


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


def _facts(config: RunConfig, topology: Topology, engine: Engine) -> dict[str, Any]:
    facts = {"topology": _topology_facts(topology), "surroundings": surroundings(engine.device)}
    return facts if config.plan is None else {**facts, "plan": to_json(config.plan)}


def _topology_facts(topology: Topology) -> dict[str, Any]:
    return {
        "world_size": topology.world_size,
        "num_replicas": topology.num_replicas,
        "wrapping": topology.wrapping.value,
    }


def _store(place: Storage, groups: _Groups, saves: SaveOptions, faults: FaultPoints) -> Store:
    return Store(
        place,
        group=groups.main,
        keep_last=saves.keep_last,
        at=faults.at,
        background_group=groups.background,
        max_staging_bytes=saves.max_staging_bytes,
    )


def _place(path: str, plan: FaultPlan, faults: FaultPoints) -> Storage:
    """Where the run lives. Planned faults of files are for directories; an object store has none."""
    if plan.faults and not is_url(path):
        return Local(path, files=PlannedFiles(faults))
    return open_storage(path)
