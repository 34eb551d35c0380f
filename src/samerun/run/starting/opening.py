"""From a configuration to a started attempt: topology, group, components, the start decision. Collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samerun.checkpoint import Store
from samerun.core import environ
from samerun.core.clock import SystemClock
from samerun.core.component import COMPONENTS, Component
from samerun.core.environ import Launcher
from samerun.core.events import Journal
from samerun.core.machine import resident_bytes
from samerun.data.source import Replica
from samerun.errors import SchemaError
from samerun.health.attach import monitor_of, pass_over_quarantined
from samerun.health.monitor import Monitor
from samerun.health.spike.detector import SpikeDetector
from samerun.plan.record import diff, from_json, to_json
from samerun.plan.run import RunPlan
from samerun.preempt.flag import StopFlag
from samerun.preempt.votes import Votes
from samerun.ranks.board import SoloBoard, board_of_default_group
from samerun.ranks.group import Group, Solo
from samerun.ranks.topology import Topology, topology_of
from samerun.ranks.torch_group import TorchGroup
from samerun.run.acting import Actor
from samerun.run.attempt import Attempt, Live, Parts
from samerun.run.config import RunConfig, SaveOptions
from samerun.run.ending import last_words
from samerun.run.ending.timings import last_timings
from samerun.run.faults import FaultPlan, FaultPoints, PlannedFiles
from samerun.run.starting.announce import describe, say
from samerun.run.starting.deciding import actor_of
from samerun.run.starting.identity import model_identity, optimizer_identity, scheduler_identity, user_identity
from samerun.run.starting.loads import LoadTries, earlier_journals
from samerun.run.starting.remap import changeable, remap_schedules
from samerun.run.starting.rewinds import settle_rewinds
from samerun.run.starting.start import Started, StartKind, start
from samerun.run.starting.surroundings import surroundings, why_not_bitwise
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
    identity = _identity(config)
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
    journals = _Journals(config, group)
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
    _announce(attempt, config, topology, facts, remapped, lead=group.rank == 0)
    attempt.journal.write("memory", ranks=group.gather([before, resident_bytes()]))  # before and after the restore
    _recall(attempt, journals.earlier(started.attempt))
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


def _settle(place: Storage, group: Group, attempt: int) -> None:
    for line in settle_rewinds(place, group, attempt):
        if group.rank == 0:
            say(line)


def _health(parts: Parts, started: Started, journal: Journal, actor: Actor | None) -> Monitor | None:
    spikes = parts.live.losses.spikes
    if spikes is None:
        return None
    return monitor_of(
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


def _votes(parts: Parts, started: Started) -> Votes | None:
    leads, prefix = parts.group.rank == 0, f"samerun/{started.run_id}/{started.attempt}/"
    board = SoloBoard() if parts.group.size == 1 else board_of_default_group(prefix=prefix)
    return None if board is None else Votes(board, parts.clock, leads=leads, say=say)


def _recall(attempt: Attempt, earlier: list[list[dict[str, Any]]]) -> None:
    """The start line's last part: what the attempt before this one measured, and whether a stop fits by that."""
    last = last_timings(earlier)
    if last is not None:
        attempt.stopping.recall(last)
        say(f"  last attempt: {last}")
        attempt.say_budget()


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


def _identity(config: RunConfig) -> dict[str, Any]:
    return {
        "model": model_identity(config.models),
        "data": config.source.identity(),
        "optimizer": {name: optimizer_identity(optimizer) for name, optimizer in config.optimizers.items()},
        "scheduler": {name: scheduler_identity(scheduler) for name, scheduler in config.schedulers.items()},
        "step": config.step.identity(),
        "user": user_identity(config.identity),
    }


def _facts(config: RunConfig, topology: Topology, engine: Engine) -> dict[str, Any]:
    facts = {"topology": _topology_facts(topology), "surroundings": surroundings(engine.device)}
    return facts if config.plan is None else {**facts, "plan": to_json(config.plan)}


def _topology_facts(topology: Topology) -> dict[str, Any]:
    return {
        "world_size": topology.world_size,
        "num_replicas": topology.num_replicas,
        "wrapping": topology.wrapping.value,
    }


class _Journals:
    """This attempt's journal, once its number is known: rank 0 writes, the others hold one that goes nowhere."""

    def __init__(self, config: RunConfig, group: Group) -> None:
        self._path = config.path
        self._writes = group.rank == 0
        self._journal: Journal | None = None

    def of(self, attempt: int) -> Journal:
        if self._journal is None:
            self._journal = self._open(attempt)
        return self._journal

    def load_tries(self, attempt: int) -> LoadTries:
        return LoadTries(self.of(attempt), self.earlier(attempt))

    def earlier(self, attempt: int) -> list[list[dict[str, Any]]]:
        """Events of the attempts before this one, oldest first. None on other ranks, nor of a run on an object store"""
        if not self._writes or is_url(self._path):
            return []
        return earlier_journals(Path(self._path) / "journal", attempt=attempt)

    def _open(self, attempt: int) -> Journal:
        if not self._writes:
            return Journal(None)
        if is_url(self._path):
            return StoredJournal(open_storage(self._path), attempt)
        return Journal(Path(self._path) / "journal" / f"{attempt:06d}.jsonl")


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


def _announce(
    attempt: Attempt,
    config: RunConfig,
    topology: Topology,
    facts: Mapping[str, Any],
    remapped: Sequence[str],
    *,
    lead: bool,
) -> None:
    started = attempt.started
    not_bitwise: list[str] = []
    if started.kind is not StartKind.FRESH:
        not_bitwise = why_not_bitwise(started.saved_facts["surroundings"], facts["surroundings"])
        before = started.saved_facts["topology"]
        if before != facts["topology"]:
            not_bitwise.append(
                f"topology was {before}, is {facts['topology']}; random streams are derived, buffers rank 0's"
            )
    planned = _plan_changes(started.saved_facts.get("plan"), config.plan)
    decision = getattr(config.source, "decision", None)
    data_policy = None if decision is None else f"{decision.policy.value}: {decision.reason}"
    if lead:
        for line in describe(
            started, path=config.path, topology=str(topology), not_bitwise=not_bitwise, data=data_policy
        ):
            say(line)
        for line in (*remapped, *(f"plan: {line}" for line in planned)):
            say(f"  {line}")
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
        plan_changes=planned,
        remapped=list(remapped),
        facts=dict(facts),
    )


def _plan_changes(saved: dict[str, Any] | None, now: RunPlan | None) -> list[str]:
    """What the plan of this start says differently from the one that the checkpoint was saved under."""
    if saved is None or now is None:
        return []
    try:
        before = from_json(saved)
    except SchemaError as error:
        return [f"the saved one cannot be read ({error})"]
    return [str(change) for change in diff(before, now)]
