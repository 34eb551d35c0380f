"""Lesson: save everything at once or nothing, and resume in the middle of an epoch.

save_checkpoint(model, optimizer, scheduler, state, path)      all of it, random streams included
rest = load_checkpoint(path, model, optimizer, scheduler)      into the objects; the rest comes back
restore_rng_state(rest["rng"])                                 last: building objects draws random numbers
continue at rest["state"]["batch_in_epoch"]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from samerun.checkpoint.attempts import newest_attempt
from samerun.checkpoint.catalog import Entry, read_catalog
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.lookup import open_run
from samerun.checkpoint.prune import plan_pruning, prune
from samerun.checkpoint.retention import Last
from samerun.checkpoint.verify import newest_sound
from samerun.convert import torch_file
from samerun.core.component import COMPONENTS, Captured, Component
from samerun.errors import MismatchError, SchemaError, UsageError
from samerun.format import names
from samerun.format.schema import MANIFEST_SCHEMA
from samerun.lessons.stored import newest, prepare, progress_at, require_sound, store_at, tree_of
from samerun.state.model import Buffers, Weights
from samerun.state.optimizer import OptimizerMemory
from samerun.state.rng import capture_rng, restore_rng
from samerun.state.schedule import Schedule, SchedulerLike
from samerun.state.tree import split_tree

CHECKPOINT_SCHEMA: Final = MANIFEST_SCHEMA

_STATE: Final = "state"
_RNG: Final = "rng"


def capture_rng_state() -> dict[str | int, Any]:
    """The global random streams of this process (Python, NumPy, torch, the current CUDA device) as plain values."""
    return capture_rng()


def restore_rng_state(state: dict[str | int, Any]) -> None:
    """Puts the global random streams back to where `capture_rng_state` saw them.

    Generators of your own, and those inside DataLoader workers, are not among them. Raises MismatchError where a CUDA
    stream was captured and there is no such device.
    """
    restore_rng(state)


def atomic_save(payload: Mapping[str, Any], path: str | Path, step: int = 0) -> Entry:
    """Publishes `payload` as a new checkpoint at `path`: all of it, or none, whenever the process or machine dies.

    `path` is a directory (or URL) that holds one checkpoint for each save; nothing is overwritten. Each value of
    `payload` is nested dicts, lists and tuples of tensors, NumPy arrays and plain values; UsageError names the place
    of anything that would need code to come back. Written aside, fsynced, renamed, the manifest last, directories
    fsynced. `step` goes into the name and the counters. Not collective: what one process holds.
    """
    state = {names.checked_component(str(name)): _captured(value) for name, value in payload.items()}
    return _publish(path, state, step)


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: SchedulerLike | None,
    state: Mapping[str, Any],
    out_path: str | Path,
) -> Entry:
    """`atomic_save` of all that a loop in one process continues from, the random streams of this moment included.

    `state` is the loop's own: `step`, `epoch`, `batch_in_epoch`, losses. On several ranks each holds streams and a
    part of the data of its own, so this raises UsageError there: `samerun.Run`, or `samerun.checkpoint.Store`.
    """
    captured = {component.name: component.capture() for component in _components(model, optimizer, scheduler)}
    captured |= {_STATE: _captured(dict(state)), _RNG: Captured(plain=capture_rng())}
    return _publish(out_path, captured, int(state.get("step", 0)))


def load_checkpoint(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: SchedulerLike | None = None,
) -> dict[str, Any]:
    """Restores the objects given from the checkpoint saved last at `path`, in place; returns the rest, by component.

    `path`: what was saved to, one checkpoint's directory, a run, or a `.pt` file, which is read with
    `weights_only=True` (keys `model`, `optimizer` or `opt`, `scheduler`). With a model, whatever belongs to objects
    must be restored: MismatchError names what was saved and not asked for. Without any, all of it is returned.

    Every file of a `ckpt.v1` checkpoint is compared with its SHA-256 before any object is touched; DamagedError and
    SchemaError say what is wrong, and nothing older is taken instead. A `.pt` file has no digests: a changed byte that
    makes sense is believed.
    """
    if Path(path).is_file():
        return _load_file(Path(path), model, optimizer, scheduler)
    storage, entry = newest(path)
    require_sound(storage, entry)
    with Checkpoint(storage, entry, rank=0, size=entry.world_size) as checkpoint:
        restored = _components(model, optimizer, scheduler) if model is not None else []
        left = {name for name in checkpoint.components if name in ("weights", "buffers", "moments", "steps")}
        left -= {component.name for component in restored}
        if model is not None and left:
            raise MismatchError(
                f"{entry.name}: also holds {', '.join(sorted(left))}, and no optimizer was given for them; pass it, or "
                f"begin a new run from the weights with samerun.warm_start"
            )
        for component in restored:
            component.restore(checkpoint.source(component.name))
        names_restored = {component.name for component in restored}
        rest = {name: tree_of(checkpoint, name) for name in checkpoint.components if name not in names_restored}
        return {"schema": CHECKPOINT_SCHEMA, "step": entry.progress.updates.value, **rest}


def rotate_checkpoints(path: str | Path, keep_last: int = 5) -> tuple[str, ...]:
    """Removes all checkpoints at `path` but the last `keep_last`; returns the names of those removed, oldest first.

    Tagged ones stay (`samerun tag`), and so does the newest that is sound: the newest is read whole first, and when
    none is sound DamagedError is raised and nothing goes. Raises UsageError for `keep_last` below 1.
    """
    policy = Last(keep_last)
    storage = open_run(path)
    proven = newest_sound(storage, read_catalog(storage))
    pruning = plan_pruning(storage, [policy], epoch=newest_attempt(storage), proven={proven}, unfinished=False)
    prune(storage, pruning)
    return pruning.removed


def _publish(path: str | Path, state: Mapping[str, Captured], step: int) -> Entry:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f"{path}: this saves what one process holds, and there are {dist.get_world_size()} ranks; use samerun.Run, "
            f"or samerun.checkpoint.Store with a group"
        )
    progress = progress_at(step)
    prepare(path)
    return store_at(path).save(state, progress, facts={}).result()


def _captured(value: Any) -> Captured:
    plain, tensors = split_tree(value, path="" if isinstance(value, (Mapping, list, tuple)) else "value")
    return Captured(plain=plain, tensors=tensors)


def _components(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: SchedulerLike | None
) -> list[Component]:
    """What belongs to objects, in the order of restoring."""
    models = {"model": model}
    components: list[Component] = [Weights(models), Buffers(models)]
    if optimizer is not None:
        optimizers = {"model": optimizer}
        components += [OptimizerMemory(optimizers, models, steps=steps) for steps in (False, True)]
        components.append(Schedule(optimizers, {} if scheduler is None else {"model": scheduler}, models))
    elif scheduler is not None:
        raise UsageError("a scheduler without its optimizer: the learning rate lives in the optimizer; pass both")
    assert all(component.name in COMPONENTS for component in components)
    return components


def _load_file(
    path: Path, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, scheduler: SchedulerLike | None
) -> dict[str, Any]:
    payload = torch_file.decode(path, str(path))
    if not isinstance(payload, Mapping):
        raise SchemaError(f"{path}: holds a {type(payload).__name__}, expected a dict of state")
    schema = payload.get("schema", CHECKPOINT_SCHEMA)
    if schema != CHECKPOINT_SCHEMA:
        raise SchemaError(f"{path}: unknown schema {schema!r}, expected {CHECKPOINT_SCHEMA!r}; migrate it first")
    rest = dict(payload)
    for given, keys in ((model, ("model",)), (optimizer, ("optimizer", "opt")), (scheduler, ("scheduler",))):
        key = next((key for key in keys if key in rest), None)
        if given is None:
            continue
        if key is None:
            raise MismatchError(f"{path}: has no {keys[0]!r}, only {', '.join(map(str, payload))}")
        try:
            given.load_state_dict(rest.pop(key))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise MismatchError(f"{path}: {key} does not fit: {error}") from error
    return rest
