"""What a plan can read from a checkpoint: the shapes of its weights, and the ranks and batch of the run that wrote it.

Only the manifest and `run.json` are read, never a tensor, and without torch. `samerun.plan` stands below
`samerun.checkpoint` and gets plain shapes and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from samerun.checkpoint.attempts import read_run
from samerun.checkpoint.catalog import read_manifest
from samerun.checkpoint.lookup import find, open_run
from samerun.cli.checkpoints.target import catalog_of, split_target
from samerun.errors import UsageError
from samerun.format import names

if TYPE_CHECKING:
    from samerun.storage.api import Storage

_WEIGHTS: Final = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """The weights of one checkpoint by name and shape, and how the run that wrote it was laid out, where it says so."""

    where: str
    name: str
    tensors: Mapping[str, tuple[int, ...]]
    num_ranks: int
    num_replicas: int | None
    global_batch: int | None

    def to_json(self) -> dict[str, Any]:
        """For the command's document; the tensors are counted, not listed."""
        return {
            "run": self.where,
            "name": self.name,
            "num_tensors": len(self.tensors),
            "num_ranks": self.num_ranks,
            "num_replicas": self.num_replicas,
            "global_batch": self.global_batch,
        }

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        replicas = "" if self.num_replicas in (None, self.num_ranks) else f", {self.num_replicas} replicas"
        batch = "" if self.global_batch is None else f", global batch {self.global_batch}"
        return f"{self.where}@{self.name}: written by {ranks}{replicas}{batch}"


def read_saved(target: str) -> SavedModel:
    """Of `RUN`, `RUN@NAME` or the directory of one checkpoint. UsageError when there is none or it has no weights."""
    path, name = split_target(target)
    storage = open_run(path)
    entry = find(storage, catalog_of(storage), name)
    manifest, _ = read_manifest(storage, entry.name)
    component = manifest.components.get(_WEIGHTS)
    if component is None or not component.tensors:
        known = ", ".join(manifest.components)
        raise UsageError(f"{storage.where}@{entry.name}: has no component `{_WEIGHTS}` with tensors, only {known}")
    topology = entry.facts.get("topology")
    replicas = topology.get("num_replicas") if isinstance(topology, dict) else None
    return SavedModel(
        where=storage.where,
        name=entry.name,
        tensors={key: tensor.shape for key, tensor in component.tensors.items()},
        num_ranks=entry.world_size,
        num_replicas=replicas if isinstance(replicas, int) else None,
        global_batch=_global_batch(storage),
    )


def _global_batch(storage: Storage) -> int | None:
    """Of `samerun.Data`, as the run began; None for one checkpoint by itself and for other sources of data."""
    run = read_run(storage) if names.RUN_FILE in storage.names("") else None
    identity = run.get("identity") if run is not None else None
    data = identity.get("data") if isinstance(identity, dict) else None
    found = data.get("global_batch") if isinstance(data, dict) else None
    return found if isinstance(found, int) else None
