"""Where this process stands among the others: its rank, and which data-parallel replica it belongs to.

`D = ranks / (TP·PP·CP)` is read off what was really built (DDP's group, the mesh of DTensor parameters, or `mesh=`),
never guessed from the number of processes. Mesh dimensions count as data parallel when their name says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samerun.core.environ import Launcher
from samerun.errors import Refused, UsageError
from samerun.ranks.shards import hold_shards, sharded_modules

CONTEXT_PARALLEL_NAMES: Final = frozenset({"cp", "context"})
DATA_PARALLEL_NAMES: Final = frozenset({"dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "ddp", "data"})


class Wrapping(Enum):
    SOLO = "one process"
    DDP = "DDP"
    SHARDED = "FSDP2"
    MESH = "mesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    rank: int
    world_size: int
    replica: int
    num_replicas: int
    leads: bool
    """Whether this rank speaks for its replica where replicas are summed: tensor-parallel peers hold the same data."""
    wrapping: Wrapping
    counts_tokens: bool = True
    """Whether this rank's tokens are its own: context-parallel peers split one example, so each counts its part."""
    num_context: int = 1
    """Ranks that split one example. Gradients are averaged over them, too (FSDP2 shards over dp and cp together)."""

    @property
    def num_averaged(self) -> int:
        """Over how many different gradients the exchange takes the mean."""
        return self.num_replicas * self.num_context

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks, {self.wrapping.value}"
        return ranks if self.num_replicas == self.world_size else f"{ranks}, {self.num_replicas} replicas"


def topology_of(models: Iterable[nn.Module], *, mesh: DeviceMesh | None, launcher: Launcher) -> Topology:
    """Raises Refused when ranks exist but the models are not tied together: their copies would diverge in silence."""
    models = [uncompiled(model) for model in models]
    hold_shards(sharded_modules(models))
    if not (dist.is_available() and dist.is_initialized()):
        if (launcher.world_size or 1) > 1:
            raise Refused(
                f"RANK={launcher.rank} of WORLD_SIZE={launcher.world_size} but no process group exists; add "
                f'`torch.distributed.init_process_group("gloo")` (or "nccl") before samerun.Run(...)'
            )
        return _solo()
    world_size = dist.get_world_size()
    if world_size == 1 and mesh is None:
        return _solo()
    _require_visible_shards(models)
    found = _mesh_of(models)
    if mesh is not None:
        return _on_mesh(mesh, Wrapping.SHARDED if found is not None else Wrapping.MESH)
    if found is not None:
        topology = _on_mesh(found, Wrapping.SHARDED)
        _require_averaged(models, topology)
        return topology
    if all(isinstance(model, DistributedDataParallel) for model in models):
        _require_whole_world(models, world_size)
        rank = dist.get_rank()
        return Topology(
            rank=rank, world_size=world_size, replica=rank, num_replicas=world_size, leads=True, wrapping=Wrapping.DDP
        )
    bare = next(type(model).__name__ for model in models if not isinstance(model, DistributedDataParallel))
    raise Refused(
        f"{world_size} ranks, but the model {bare} is neither DDP, nor has DTensor parameters (fully_shard), nor was "
        f"mesh= given: every rank would train a copy of its own. Wrap it: DistributedDataParallel(model)"
    )


def uncompiled(model: nn.Module) -> nn.Module:
    """What torch.compile was applied to: its wrapper hides from isinstance() that it holds a DDP or sharded model."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def _require_whole_world(models: list[nn.Module], world_size: int) -> None:
    for model in models:
        assert isinstance(model, DistributedDataParallel)
        num_tied = dist.get_world_size(model.process_group)
        if num_tied != world_size:
            raise Refused(
                f"DDP ties {num_tied} of {world_size} ranks together, so there would be several models under one name; "
                f"build it over all ranks, or say what the others are with mesh="
            )


def _require_visible_shards(models: list[nn.Module]) -> None:
    """DDP over a tensor-parallel model makes plain parameters of its shards: norms and checkpoints would take each for
    the whole.
    """
    for model in models:
        hidden = [name for name, parameter in model.named_parameters() if hasattr(parameter, "_st_info")]
        if hidden:
            raise Refused(
                f"DDP was put around a tensor-parallel model, which hides that {hidden[0]} is a shard: its norm would "
                f"be taken, and its part saved, as if it were whole. Use fully_shard(model, mesh=mesh['dp']): it keeps "
                f"DTensors"
            )


def _require_averaged(models: list[nn.Module], topology: Topology) -> None:
    """FSDP2 averages the gradients of what it sharded; a head that it was not told of trains on each rank's own."""
    for model in models:
        if isinstance(model, DistributedDataParallel):
            continue
        alone = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
        if alone and topology.num_averaged > 1:
            names = ", ".join(alone[:3]) + (" …" if len(alone) > 3 else "")
            raise Refused(
                f"{topology.num_replicas} replicas, and fully_shard was applied to some parameters but not to {names}: "
                f"nobody averages their gradients, so every rank would train a copy of its own. Apply it to the whole "
                f"model, too: fully_shard(model). If your own code averages them, say so with mesh="
            )


def _solo() -> Topology:
    return Topology(rank=0, world_size=1, replica=0, num_replicas=1, leads=True, wrapping=Wrapping.SOLO)


def _mesh_of(models: list[nn.Module]) -> DeviceMesh | None:
    meshes = {p.device_mesh for model in models for p in model.parameters() if isinstance(p, DTensor)}
    return max(meshes, key=lambda mesh: mesh.ndim) if meshes else None


def _on_mesh(mesh: DeviceMesh, wrapping: Wrapping) -> Topology:
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim > 1 and wrapping is Wrapping.MESH:
        raise UsageError(f"mesh= has {mesh.ndim} unnamed dimensions; name them, e.g. mesh_dim_names=('dp', 'tp')")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"rank {dist.get_rank()} is not part of mesh= {mesh}")
    replica, num_replicas, num_context, leads, counts_tokens = 0, 1, 1, True, True
    for dim in range(mesh.ndim):
        if names is None or names[dim] in DATA_PARALLEL_NAMES:
            replica = replica * mesh.size(dim) + coordinate[dim]
            num_replicas *= mesh.size(dim)
            continue
        leads = leads and coordinate[dim] == 0
        if names[dim] in CONTEXT_PARALLEL_NAMES:
            num_context *= mesh.size(dim)
        else:
            counts_tokens = counts_tokens and coordinate[dim] == 0
    if mesh.size() != dist.get_world_size():
        raise UsageError(
            f"the mesh covers {mesh.size()} of {dist.get_world_size()} ranks; give mesh= the whole mesh of the run, "
            f"with its tensor-parallel and pipeline dimensions"
        )
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        replica=replica,
        num_replicas=num_replicas,
        leads=leads,
        wrapping=wrapping,
        counts_tokens=counts_tokens,
        num_context=num_context,
    )
