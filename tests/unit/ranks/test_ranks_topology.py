"""What a rank is among the others, decided from what was really built, and refused where copies would diverge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from samerun.core.environ import launcher
from samerun.errors import Refused, UsageError
from samerun.ranks.topology import Topology, Wrapping, topology_of

ALONE = launcher({})


def fake_world(rank: int, size: int) -> None:
    """A process group whose peers do not exist: topology asks nobody anything."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def of(*models: nn.Module, mesh: DeviceMesh | None = None) -> Topology:
    return topology_of(models, mesh=mesh, launcher=ALONE)


def test_one_process_is_alone() -> None:
    topology = of(nn.Linear(2, 2))
    assert (topology.rank, topology.world_size, topology.num_replicas, topology.leads) == (0, 1, 1, True)
    assert (topology.wrapping, str(topology)) == (Wrapping.SOLO, "1 rank")


def test_a_group_of_one_is_alone_too() -> None:
    fake_world(0, 1)
    assert of(nn.Linear(2, 2)).wrapping is Wrapping.SOLO


def test_ranks_without_a_group_are_refused_with_the_line_to_add() -> None:
    with pytest.raises(Refused) as refused:
        topology_of([nn.Linear(2, 2)], mesh=None, launcher=launcher({"RANK": "1", "WORLD_SIZE": "2"}))
    assert "RANK=1 of WORLD_SIZE=2 but no process group exists" in refused.value.reason
    assert 'init_process_group("gloo")' in refused.value.reason


def test_torchrun_with_one_rank_needs_no_group() -> None:
    assert topology_of([nn.Linear(2, 2)], mesh=None, launcher=launcher({"RANK": "0", "WORLD_SIZE": "1"})).leads


def test_bare_models_on_several_ranks_are_refused_by_name() -> None:
    fake_world(1, 2)
    with pytest.raises(Refused, match="2 ranks, but the model Linear is neither DDP, nor has DTensor parameters"):
        of(nn.Linear(2, 2))


def test_one_bare_model_of_several_is_enough_to_refuse() -> None:
    fake_world(1, 2)
    with pytest.raises(Refused, match="the model Conv1d is neither DDP"):
        of(DistributedDataParallel(nn.Linear(2, 2)), nn.Conv1d(1, 1, 1))


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (2, 3)])
def test_under_ddp_each_rank_is_a_replica(rank: int, size: int) -> None:
    fake_world(rank, size)
    topology = of(DistributedDataParallel(nn.Linear(2, 2)))
    assert (topology.rank, topology.replica, topology.num_replicas, topology.leads) == (rank, rank, size, True)
    assert str(topology) == f"{size} ranks, DDP"


def test_ddp_over_part_of_the_ranks_is_refused() -> None:
    fake_world(0, 4)
    half = dist.new_group([0, 1])
    with pytest.raises(Refused, match="DDP ties 2 of 4 ranks together"):
        of(DistributedDataParallel(nn.Linear(2, 2), process_group=half))


def test_under_fsdp2_each_rank_is_a_replica() -> None:
    fake_world(2, 4)
    topology = of(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (4,))))
    assert (topology.replica, topology.num_replicas, topology.wrapping) == (2, 4, Wrapping.SHARDED)


def test_hybrid_sharding_counts_every_rank_once() -> None:
    fake_world(5, 6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    topology = of(fully_shard(nn.Linear(2, 2), mesh=mesh))
    assert (topology.replica, topology.num_replicas) == (5, 6)


@pytest.mark.parametrize(
    ("rank", "replica", "leads"), [(0, 0, True), (1, 0, False), (2, 1, True), (3, 1, False), (7, 3, False)]
)
def test_tensor_parallel_peers_are_one_replica_and_one_of_them_leads(rank: int, replica: int, leads: bool) -> None:
    fake_world(rank, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    topology = of(nn.Linear(2, 2), mesh=mesh)
    assert (topology.replica, topology.num_replicas, topology.leads) == (replica, 4, leads)
    assert (topology.wrapping, str(topology)) == (Wrapping.MESH, "8 ranks, mesh, 4 replicas")


def test_a_mesh_of_unnamed_dimensions_is_refused() -> None:
    fake_world(0, 4)
    with pytest.raises(UsageError, match="2 unnamed dimensions; name them"):
        of(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2)))


def test_a_mesh_over_part_of_the_ranks_is_refused() -> None:
    fake_world(0, 4)
    with pytest.raises(UsageError, match="the mesh covers 2 of 4 ranks"):
        of(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))


def test_a_rank_outside_the_mesh_is_refused() -> None:
    fake_world(3, 4)
    with pytest.raises(UsageError, match="rank 3 is not part of mesh="):
        of(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))
