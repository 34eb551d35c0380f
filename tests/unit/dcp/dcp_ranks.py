"""What each rank of a real process group does in the tests of the DCP plug-in. Global tensors are known anywhere."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from samerun.dcp import LoadPlanner, Reader, SavePlanner, Writer, real_errors

SHAPES = [(7, 13), (13, 2), (1, 5), (2, 3, 4), (16,), (0, 3), (3, 0), ()]
WORDS: dict[str, Placement] = {"R": Replicate(), "0": Shard(0), "1": Shard(1)}
PLANNERS: dict[str, Any] = {
    "ours": (SavePlanner, LoadPlanner),
    "stock": (DefaultSavePlanner, DefaultLoadPlanner),
}


def full(number: int) -> torch.Tensor:
    shape = torch.Size(SHAPES[number])
    return torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) + 100 * number


def distributed(number: int, mesh_shape: list[int], word: str, *, blank: bool = False) -> torch.Tensor:
    tensor = torch.full_like(full(number), -1.0) if blank else full(number)
    if (
        not dist.is_initialized()
    ):  # a mesh would make a group of its own, and this rank would count one more than others
        return tensor
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    placements = [WORDS[letter] for letter in word]
    placements = [p if not isinstance(p, Shard) or p.dim < tensor.dim() else Replicate() for p in placements]
    return distribute_tensor(tensor, mesh, placements)


def tensors(mesh_shape: list[int], word: str, *, blank: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {str(n): distributed(n, mesh_shape, word, blank=blank) for n in range(len(SHAPES))}
    return {**state, "plain": torch.full((5,), -1.0 if blank else 5.0), "count": 0 if blank else 3}


def save_tensors(path: str, mesh_shape: list[int], word: str, planner: str) -> None:
    with real_errors():
        dcp.save(tensors(mesh_shape, word), storage_writer=Writer(path), planner=PLANNERS[planner][0]())


def load_tensors(path: str, mesh_shape: list[int], word: str, planner: str) -> list[str]:
    """What came back wrong."""
    live, wanted = tensors(mesh_shape, word, blank=True), tensors(mesh_shape, word)
    with real_errors():
        dcp.load(live, storage_reader=Reader(path), planner=PLANNERS[planner][1]())
    return [key for key in wanted if not same(live[key], wanted[key])]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, DTensor):
        return torch.equal(left.to_local(), right.to_local())
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


# --- whole trainings


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return out


def wrapped(kind: str) -> nn.Module:
    """The model, wrapped for all ranks there are. Its values are the same everywhere."""
    torch.manual_seed(7)
    model = Net()
    if not dist.is_initialized():  # a world of one needs no wrapping
        return model
    world = dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind in ("tp", "2d"):
        tp = world if kind == "tp" else 2
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"]) if kind == "2d" else model
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def trained(kind: str, *, fresh: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Moments that depend on the elements alone, so that every world has the same: no float sums over ranks."""
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if fresh else parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, memory = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": memory}


def digest(state: Any) -> Any:
    """The state with every tensor whole, as JSON."""
    if isinstance(state, DTensor):
        return digest(state.full_tensor())
    if isinstance(state, torch.Tensor):
        return state.double().tolist()
    if isinstance(state, dict):
        return {str(key): digest(value) for key, value in state.items()}
    return [digest(item) for item in state] if isinstance(state, (list, tuple)) else state


def save_training(path: str, kind: str, planner: str) -> Any:
    state = state_of(*trained(kind, fresh=False))
    with real_errors():
        dcp.save(state, storage_writer=Writer(path), planner=PLANNERS[planner][0]())
    return digest(state)


def load_training(path: str, kind: str, planner: str) -> Any:
    model, optimizer = trained(kind, fresh=True)
    state = state_of(model, optimizer)
    with real_errors():
        dcp.load(state, storage_reader=Reader(path), planner=PLANNERS[planner][1]())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return digest(state_of(model, optimizer))


# --- what is read


def save_large(path: str, num_mib: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = num_mib * 2**20 // 4 // 1024
    local = torch.arange(rows // dist.get_world_size() * 1024, dtype=torch.float32).reshape(-1, 1024) + dist.get_rank()
    with real_errors():
        dcp.save({"w": DTensor.from_local(local, mesh, [Shard(0)])}, storage_writer=Writer(path))


def high_water_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def load_large(path: str, num_mib: int, saved_on: int) -> dict[str, Any]:
    """Bytes wanted and read, and by how much this process grew beyond what it loads."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    rows = num_mib * 2**20 // 4 // 1024
    local = torch.full((rows // world, 1024), -1.0)
    with real_errors():  # so that code and allocator are warm
        dcp.load({}, storage_reader=Reader(path), planner=DefaultLoadPlanner())
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before = high_water_kib()
    reader = Reader(path)
    with real_errors():
        dcp.load({"w": DTensor.from_local(local, mesh, [Shard(0)])}, storage_reader=reader, planner=LoadPlanner())
    grown = high_water_kib() - before
    numbers = torch.arange(rank * (rows // world), (rank + 1) * (rows // world))
    per_saved = rows // saved_on
    first = (numbers % per_saved * 1024 + numbers // per_saved).to(torch.float32)
    return {
        "wanted": reader.account.wanted_bytes,
        "read": reader.account.read_bytes,
        "verified": reader.account.verified_bytes,
        "grown": grown * 1024,
        "right": bool(torch.equal(local[:, 0], first)),
    }


# --- ranks that differ


def save_own_state(path: str, planner: str, kind: str) -> str:
    """Every rank has another value (or random stream) under one key."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    own: Any = {"value": dist.get_rank(), "rng": generator.get_state(), "alike": 3}[kind]
    try:
        with real_errors():
            dcp.save({"own": own, "w": torch.ones(2)}, storage_writer=Writer(path), planner=PLANNERS[planner][0]())
    except ValueError as error:
        return str(error)
    return "saved"


def load_own_state(path: str, planner: str) -> int:
    state = {"own": -1, "w": torch.ones(2)}
    dcp.load(state, storage_reader=Reader(path), planner=PLANNERS[planner][1]())
    return int(state["own"])


def disagreeing(path: str, what: str) -> str:
    rank = dist.get_rank()
    tensor: Any = {
        "dtype": torch.ones(2, dtype=torch.float64 if rank else torch.float32),
        "shape": torch.ones(2 + rank),
        "kind": torch.ones(2) if rank else 3,
    }[what]
    try:
        with real_errors():
            dcp.save({"w": tensor}, storage_writer=Writer(path), planner=SavePlanner())
    except Exception as error:  # noqa: BLE001  # whatever it is belongs to the test
        return f"{type(error).__name__}: {error}"
    return "saved"


def not_shared(path: str) -> str:
    """Each rank writes to a directory of its own, as on machines without a shared file system."""
    try:
        with real_errors():
            dcp.save({"w": torch.ones(2)}, storage_writer=Writer(f"{path}/{dist.get_rank()}"), planner=SavePlanner())
    except OSError as error:
        return str(error)
    return "saved"


def cached_saves(path: str, planner: str) -> list[str]:
    """Three saves with a plan cache; the third in another dtype. What came back wrong."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    keeper = PLANNERS[planner][0](enable_plan_caching=True)
    wrong = []
    for number, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16)):
        value = torch.arange(13).to(dtype) + number
        state = {"w": distribute_tensor(value, mesh, [Shard(0)]), "n": number}
        try:
            with real_errors():
                dcp.save(state, storage_writer=Writer(f"{path}/{number}"), planner=keeper)
        except ValueError as error:
            wrong.append(f"{number}: {error}")
            continue
        live = {"w": distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]), "n": -1}
        with real_errors():
            dcp.load(live, storage_reader=Reader(f"{path}/{number}"), planner=LoadPlanner())
        if not same(live["w"], state["w"]) or live["n"] != number:
            wrong.append(f"{number}: {live}")
    return wrong


def one_rank_fails(path: str) -> str:
    """The last rank's disk is full: every rank must learn it, and nothing is published."""
    import errno

    from samerun.storage.faulty import FaultyFiles
    from samerun.storage.local import Local

    last = dist.get_rank() == dist.get_world_size() - 1
    files = FaultyFiles(at=4 if last else None, error_number=errno.ENOSPC, lasting=True)
    try:
        with real_errors():
            dcp.save({"w": torch.ones(2)}, storage_writer=Writer(Local(path, files=files)), planner=SavePlanner())
    except OSError as error:
        return f"{error.errno}"
    return "saved"


class KilledWriter(Writer):
    """Kills rank 1 once its files are there and before it can report them."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return future


def killed_in_a_save(path: str, report: str) -> None:
    """A rank that is killed cannot answer, so the other one tells a file."""
    try:
        with real_errors():
            dcp.save(tensors([2], "0"), storage_writer=KilledWriter(path), planner=SavePlanner())
        Path(report).write_text("saved")
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test judges it
        Path(report).write_text(f"{type(error).__name__}: {error}")


def keys_in_another_order(path: str) -> list[str]:
    """Parts whose `load_state_dict` is collective: each rank names them in an order of its own."""
    told: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            names: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(names, self.name)
            told.extend(sorted(set(names)))

    parts = [(name, Part(name)) for name in ("a", "b", "c")]
    state = dict(parts if dist.get_rank() == 0 else reversed(parts))
    with real_errors():
        dcp.save(state, storage_writer=Writer(path), planner=SavePlanner())
        dcp.load(state, storage_reader=Reader(path), planner=LoadPlanner())
    return told


def asynchronous(path: str, process: bool) -> list[str]:
    """Background saves of this world on a group of its own; what came back wrong."""
    warnings.filterwarnings("ignore")
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(13.0)
    state = {"w": distribute_tensor(value, mesh, [Shard(0)]), "n": 4}
    kind = (
        dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        if process
        else dcp.state_dict_saver.AsyncCheckpointerType.THREAD
    )
    future = dcp.async_save(
        state, storage_writer=Writer(path), planner=SavePlanner(), process_group=group, async_checkpointer_type=kind
    )
    state["w"].to_local().zero_()
    with real_errors():
        future.result()
    live = {"w": distribute_tensor(torch.zeros(13), mesh, [Shard(0)]), "n": -1}
    with real_errors():
        dcp.load(live, storage_reader=Reader(path), planner=LoadPlanner())
    return [] if torch.equal(live["w"].full_tensor(), value) and live["n"] == 4 else [str(live)]


# --- sharded tensors, as PyTorch's own contract has them


def enumerated(shape: list[int], spans: list[list[int]], *, dim: int = 0, fill: bool = True) -> ShardedTensor:
    """A ShardedTensor cut along `dim` into [offset, length, rank], several pieces of it on one rank."""
    shards = []
    for offset, length, rank in spans:
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = offset, length
        shards.append(ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=f"rank:{rank}/cpu"))
    tensor = sharded_tensor.zeros(EnumerableShardingSpec(shards), *shape)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    for shard in tensor.local_shards():
        if fill:
            place = tuple(
                slice(o, o + n) for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            )
            shard.tensor.copy_(whole[place])
    return tensor


def reshard_sharded(path: str, shape: list[int], plans: list[Any], planner: str) -> list[str]:
    """Every plan ([dim, spans], or null for a plain tensor) loads what every other saved. What came back wrong."""
    warnings.filterwarnings("ignore")
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    wrong = []
    for number, before in enumerate(plans):
        place = f"{path}/{number}"
        saved: Any = whole if before is None else enumerated(shape, before[1], dim=before[0])
        with real_errors():
            dcp.save({"t": saved}, storage_writer=Writer(place), planner=PLANNERS[planner][0]())
        for other, after in enumerate(plans):
            live: Any = torch.zeros(shape) if after is None else enumerated(shape, after[1], dim=after[0], fill=False)
            with real_errors():
                dcp.load({"t": live}, storage_reader=Reader(place), planner=PLANNERS[planner][1]())
            wanted: Any = whole if after is None else enumerated(shape, after[1], dim=after[0])
            pairs = (
                [(live, wanted)]
                if after is None
                else [(a.tensor, b.tensor) for a, b in zip(live.local_shards(), wanted.local_shards(), strict=True)]
            )
            if not all(torch.equal(a, b) for a, b in pairs):
                wrong.append(f"{number} to {other}")
    return wrong
