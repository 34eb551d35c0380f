"""How a run starts: fresh, resumed, fallen back, or refused. Every rank decides alike and says why.

identity equal on all ranks            else refuse, with the differences
no run here                            write run.json, start fresh
another run here                       refuse, exit 4, nothing touched
otherwise take an attempt number, then newest checkpoint first:
    all ranks open and restore it      bad bytes on any rank → all take the next one, and say why
bytes that are sound but do not fit    refuse: an older checkpoint would not fit either
nothing restorable                     fresh if nothing was ever committed, else refuse
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from samerun.checkpoint import Catalog, Checkpoint, Entry, Store
from samerun.core.canonical import canonical_bytes, sha256_hex
from samerun.core.component import Component
from samerun.core.events import Journal
from samerun.core.progress import Progress
from samerun.errors import CheckpointError, MismatchError, Refused, StorageError
from samerun.ranks.group import Group
from samerun.run.starting.identity import differences
from samerun.run.starting.loads import MAX_CRASHES, LoadTries
from samerun.state.optimizer import OptimizerMemory
from samerun.state.rng import Rng


class StartKind(Enum):
    FRESH = "fresh"
    RESUMED = "resumed"
    FALLEN_BACK = "fallen back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A checkpoint that was not taken, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    kind: StartKind
    run_id: str
    attempt: int
    progress: Progress
    checkpoint: str | None = None
    """Name of the checkpoint that was restored."""
    passed: tuple[Passed, ...] = ()
    restored: tuple[str, ...] = ()
    waived: tuple[str, ...] = ()
    saved_facts: Mapping[str, Any] = field(default_factory=dict)
    saved_digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    saved_world_size: int | None = None


def start(
    store: Store,
    group: Group,
    *,
    identity: Mapping[str, Any],
    components: Sequence[Component],
    waive: Sequence[str],
    facts: Mapping[str, Any],
    changeable: Collection[str] = (),
    load_tries: Callable[[int], LoadTries] = lambda attempt: LoadTries(Journal(None)),
    settle: Callable[[int], object] = lambda attempt: None,
) -> Started:
    """Collective. Raises Refused with the reason.

    A path that cannot be used, or holds another run, is left as it is. Where only the checkpoints do not fit or cannot
    be loaded, the attempt's number has been taken: it fences off an older attempt that may still be writing. `settle`
    is called with the number before checkpoints are listed.
    """
    _require_same_identity(group, identity)
    found = _same_on_all(group, store.read_run if group.rank == 0 else None)
    if found is None:
        run_id = str(group.broadcast(uuid.uuid4().hex))
        store.write_run({"id": run_id, "identity": dict(identity)})
        attempt = store.open_attempt(dict(facts))
        return Started(kind=StartKind.FRESH, run_id=run_id, attempt=attempt, progress=Progress())
    _require_same_run(store, found, identity, changeable)
    attempt = store.open_attempt(dict(facts))
    tries = load_tries(attempt)
    try:
        settle(attempt)
        return _resume(store, group, str(found["id"]), attempt, components, waive, tries)
    except Refused as refusal:
        tries.refused(refusal.reason)
        raise


def _resume(
    store: Store,
    group: Group,
    run_id: str,
    attempt: int,
    components: Sequence[Component],
    waive: Sequence[str],
    tries: LoadTries,
) -> Started:
    catalog = _catalog(store, group)
    listed = [[entry.name, tries.num_crashes(entry.name)] for entry in catalog.entries]
    seen = [listed, [[r.name, r.reason, r.committed] for r in catalog.rejected]]
    listed, rejected = group.broadcast(seen)  # one view for all ranks: what follows branches on it
    lost = [Passed(name=name, reason=reason) for name, reason, committed in rejected if committed]
    passed = [*lost, *(Passed(name=name, reason=reason) for name, reason, committed in rejected if not committed)]
    for name, num_crashes in listed:
        if num_crashes >= MAX_CRASHES:
            lost.append(Passed(name=name, reason=f"the last {num_crashes} attempts crashed while loading it"))
            passed.insert(0, lost[-1])
            continue
        tries.loading(name)
        entry = next((entry for entry in catalog.entries if entry.name == name), None)
        checkpoint, problem = _try_restore(store, entry, components, waive, run_id, group)
        outcomes = group.gather(problem)
        problems = [outcome for outcome in outcomes if outcome is not None]
        if not problems:
            assert checkpoint is not None
            return Started(
                kind=StartKind.FALLEN_BACK if lost else StartKind.RESUMED,
                run_id=run_id,
                attempt=attempt,
                progress=checkpoint.progress,
                checkpoint=name,
                passed=tuple(passed),
                restored=tuple(c.name for c in components if c.name not in waive),
                waived=tuple(waive),
                saved_facts=checkpoint.facts,
                saved_digests=checkpoint.digests,
                saved_world_size=checkpoint.world_size,
            )
        rank, (kind, reason) = next((rank, o) for rank, o in enumerate(outcomes) if o is not None)
        if kind == "mismatch":
            raise Refused(
                f"{store.path}: checkpoint {name} is sound but does not fit this program (rank {rank}): {reason}"
            )
        lost.append(Passed(name=name, reason=f"rank {rank}: {reason}"))
        passed.insert(0, lost[-1])
    if lost:
        reasons = "\n  ".join(map(str, lost))
        raise Refused(
            f"{store.path}: checkpoints were committed here, but none can be loaded:\n  {reasons}\n"
            f"restore one of them from a copy, or start a new run at another path"
        )
    return Started(kind=StartKind.FRESH, run_id=run_id, attempt=attempt, progress=Progress(), passed=tuple(passed))


def _catalog(store: Store, group: Group) -> Catalog:
    """Raises Refused on every rank where one cannot tell which checkpoint is the newest."""
    catalog, problem = Catalog(entries=(), rejected=()), None
    try:
        catalog = store.catalog()
    except (CheckpointError, StorageError) as error:
        problem = str(error)
    found = next((one for one in group.gather(problem) if one is not None), None)
    if found is not None:
        raise Refused(f"{store.path}: which checkpoint is the newest cannot be told: {found}")
    return catalog


def _try_restore(
    store: Store,
    entry: Entry | None,
    components: Sequence[Component],
    waive: Sequence[str],
    run_id: str,
    group: Group,
) -> tuple[Checkpoint | None, tuple[str, str] | None]:
    """The restored checkpoint, or (kind, reason) of what prevented it on this rank."""
    if entry is None:
        return None, ("damage", "this rank does not see it; is the path on storage that all ranks share?")
    try:
        with store.open(entry) as checkpoint:
            _restore_all(checkpoint, components, waive, run_id=run_id, rank=group.rank, world_size=group.size)
    except MismatchError as error:
        return None, ("mismatch", str(error))
    except (CheckpointError, StorageError) as error:
        return None, ("damage", str(error))
    return checkpoint, None


def _restore_all(
    checkpoint: Checkpoint,
    components: Sequence[Component],
    waive: Sequence[str],
    *,
    run_id: str,
    rank: int,
    world_size: int,
) -> None:
    saved, live = set(checkpoint.components), {component.name for component in components}
    if missing := sorted(live - saved - set(waive)):
        raise MismatchError(f"the checkpoint holds no {', '.join(missing)}; waive={tuple(missing)!r} starts them fresh")
    if extra := sorted(saved - live - set(waive)):
        raise MismatchError(
            f"the checkpoint holds {', '.join(extra)}, which the program has not; pass extra= again, or drop them with "
            f"waive={tuple(extra)!r}"
        )
    left_alone = set(waive)
    for component in components:
        if component.name in waive:
            _start_fresh(checkpoint, component)
        elif isinstance(component, Rng) and checkpoint.world_size != world_size:
            component.derive(run_id=run_id, windows=int(checkpoint.progress.windows), rank=rank)
            left_alone.add(component.name)
        else:
            component.restore(checkpoint.source(component.name))
    leftover = [key for key in checkpoint.unconsumed() if key.split("/", 1)[0] not in left_alone]
    if leftover:
        raise MismatchError(
            f"{len(leftover)} entries of the checkpoint were restored nowhere: {', '.join(leftover[:4])}"
        )


def _start_fresh(checkpoint: Checkpoint, component: Component) -> None:
    if isinstance(component, OptimizerMemory) and component.name in checkpoint.components:
        component.forget(checkpoint.source(component.name))


def _require_same_identity(group: Group, identity: Mapping[str, Any]) -> None:
    digests = group.gather(sha256_hex(canonical_bytes(dict(identity))))
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        all_of_them = group.gather(dict(identity))
        unlike = differences(all_of_them[0], all_of_them[odd[0]])
        listed = "; ".join(f"{d.what}: rank 0 {d.shown(d.saved)}, rank {odd[0]} {d.shown(d.now)}" for d in unlike[:4])
        raise Refused(
            f"ranks {odd} were started with another model, data, optimizer or identity than rank 0; a run is one "
            f"program on all ranks. Different: {listed}"
        )


def _require_same_run(
    store: Store, found: Mapping[str, Any], identity: Mapping[str, Any], changeable: Collection[str]
) -> None:
    unlike = [
        d
        for d in differences(found.get("identity"), dict(identity))
        if not any(d.what == name or d.what.startswith(f"{name}.") for name in changeable)
    ]
    if unlike:
        listed = "\n  ".join(map(str, unlike[:12])) + (f"\n  and {len(unlike) - 12} more" if len(unlike) > 12 else "")
        raise Refused(
            f"{store.path} holds another run; nothing was touched. Different:\n  {listed}\n"
            f"ways on: undo the change to continue that run, or give this one a new path (samerun.warm_start takes the "
            f"weights along)"
        )


def _same_on_all(group: Group, read: Any) -> dict[str, Any] | None:
    """Rank 0 reads; everybody learns what it found or why it could not."""
    value: Any = None
    problem: str | None = None
    if read is not None:
        try:
            value = read()
        except (CheckpointError, StorageError) as error:
            problem = str(error)
    value, problem = group.broadcast([value, problem])
    if problem is not None:
        raise Refused(f"this path cannot be used for a run: {problem}")
    assert value is None or isinstance(value, dict)
    return value
