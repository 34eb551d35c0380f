"""Where the checkpoints of the lessons lie, and what is in them: a store of `ckpt.v1`, opened by path for each call."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from samerun.checkpoint.catalog import Entry, read_catalog, read_entry, read_pointer
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.lookup import open_run
from samerun.checkpoint.store import Store
from samerun.checkpoint.verify import verify_checkpoint
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import DamagedError, MismatchError, NotFoundError, UnfinishedError, UsageError
from samerun.format import names
from samerun.format.schema import MANIFEST_SCHEMA
from samerun.ranks.group import Group
from samerun.state.tree import join_tree
from samerun.storage.api import Storage
from samerun.storage.opening import open_storage

_KIND: Final = "lesson"
_PICKLES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_KEEP_ALL: Final = sys.maxsize
"""Saving removes nothing: that is `rotate_checkpoints`."""


def prepare(path: str | Path) -> None:
    """Makes `path` a place for checkpoints, or finds that it is one. UsageError when it holds anything else."""
    if Path(path).suffix in _PICKLES or Path(path).is_file():
        raise UsageError(
            f"{path}: is the name of a file, and a {MANIFEST_SCHEMA} checkpoint is a directory of safetensors and "
            f"JSON; write a directory, like {Path(path).with_suffix('')}"
        )
    if names.MANIFEST in open_storage(path).names(""):
        raise UsageError(f"{path}: is a checkpoint by itself, and one is never written into; save to another path")
    store = Store(path)
    found = store.read_run()
    if found is None:
        store.write_run({"id": uuid.uuid4().hex, "identity": {}, "kind": _KIND})
    elif found.get("kind") != _KIND:
        raise UsageError(f"{path}: holds a run of samerun.Run, which saves it itself; save to a path of your own")


def store_at(path: str | Path, group: Group | None = None) -> Store:
    """The store at a prepared path, as one rank holds it."""
    return Store(path, group=group, keep_last=_KEEP_ALL)


def progress_at(step: int) -> Progress:
    """Counters of a loop that counts only its steps."""
    if type(step) is not int or step < 0:
        raise UsageError(f"step={step!r} must be a whole number of steps done so far, 0 or more")
    return Progress(windows=Windows(step), updates=Updates(step))


def newest(path: str | Path) -> tuple[Storage, Entry]:
    """The checkpoint that was saved last at `path`, or the one that `path` is.

    It or none: a damaged one is raised (DamagedError, SchemaError), never passed over for an older one in silence.
    """
    try:
        storage = open_run(path)
    except UsageError as error:
        raise NotFoundError(
            2, "holds no checkpoint; nothing was saved here, or it lies elsewhere", str(path)
        ) from error
    catalog = read_catalog(storage)
    pointer = read_pointer(storage, names.LATEST_FILE)
    for rejected in catalog.rejected:
        if rejected.committed and (pointer is None or rejected.name == pointer.name):
            read_entry(storage, rejected.name)  # raises what is wrong with it
    if not catalog.entries:
        why = "; ".join(rejected.reason for rejected in catalog.rejected) or "nothing was saved"
        raise UnfinishedError(f"{storage.where}: there is no complete checkpoint ({why})")
    return storage, catalog.entries[0]


def require_sound(storage: Storage, entry: Entry) -> None:
    """Reads every file whole and compares its SHA-256. Raises DamagedError naming all that is wrong."""
    problems = verify_checkpoint(storage, entry.name).problems
    if problems:
        raise DamagedError("; ".join(problems))


def tree_of(checkpoint: Checkpoint, component: str) -> Any:
    """One component as nested dicts and lists of plain values and tensors in host memory, every byte verified."""
    source = checkpoint.source(component)
    tensors = {key: torch.empty(spec.shape, dtype=spec.dtype) for key, spec in source.specs.items()}
    for key, tensor in tensors.items():
        source.read_into(key, tensor)
    plain, placed = source.plain, set[str]()

    def place(key: str, host: bool) -> torch.Tensor:
        if key not in tensors:
            raise MismatchError(f"{checkpoint.entry.name}: {component}: refers to a tensor {key} that is not there")
        placed.add(key)
        return tensors[key]

    try:
        tree = join_tree(plain, place)
    except (TypeError, ValueError) as error:
        raise DamagedError(f"{checkpoint.entry.name}: {component}: is no tree that samerun writes: {error}") from error
    rest = {key: tensor for key, tensor in tensors.items() if key not in placed}
    if not rest:
        return tree
    return {**rest, **_tied(tree, rest)} if tree is None or isinstance(tree, Mapping) else {"plain": tree, **rest}


def _tied(tree: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied weights under their second names."""
    aliases = tree.get("aliases", {}) if isinstance(tree, Mapping) else {}
    return {str(second): tensors[first] for second, first in aliases.items() if first in tensors}
