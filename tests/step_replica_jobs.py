"""What ranks do for the tests of replicas that differ: in what they use, and in how many microbatches they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import samerun
from samerun.step import Step
from step_jobs import WIDTH, batches, flat, loss_sum, mine, net


class TwoExperts(nn.Module):
    """A batch uses one of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1, bias=False, dtype=dtype)
        self.b = nn.Linear(1, 1, bias=False, dtype=dtype)
        self.c = nn.Linear(1, 1, bias=False, dtype=dtype)

    def forward(self, name: str, value: float) -> torch.Tensor:
        expert: nn.Linear = getattr(self, name)
        return expert(torch.full((1, 1), value, dtype=expert.weight.dtype)).sum()


def experts(order: Sequence[Sequence[str]], *, dtype: str, optimizers: int = 1) -> dict[str, float | None]:
    """The gradients at the step, expert by expert, after each rank used them in its own order."""
    model = DistributedDataParallel(TwoExperts(getattr(torch, dtype)), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    models: Any = {"model": model, "other": DistributedDataParallel(nn.Linear(1, 1))} if optimizers > 1 else model
    both = {"model": optimizer, "other": torch.optim.SGD(models["other"].parameters())} if optimizers > 1 else optimizer
    step = Step(models, both)
    seen: dict[str, float | None] = {}

    def look(*_: Any) -> None:
        for name, parameter in model.module.named_parameters():
            seen[name[0]] = None if parameter.grad is None else float(parameter.grad)

    optimizer.register_step_pre_hook(look)
    window = step.window(order[dist.get_rank()])
    for name in window:
        window.backward(model(name, {"a": 1.0, "b": 16.0, "c": 64.0}[name]), 1, of="model")
    window.step("model")
    return seen


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(torch.tanh(self.into(x)))
        return result


def uneven(kind: str, counts: Sequence[int], *, accumulate: str = "sharded") -> dict[str, Any]:
    """One window of a sharded model of which the last rank has a microbatch fewer; `kind` says what a batch does."""
    model = Tower().double()
    second = nn.Linear(1, 1).double()
    parameters = [*model.parameters(), *second.parameters()]
    replica, num_replicas = 0, 1
    if dist.is_initialized():
        replica, num_replicas = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (num_replicas,), mesh_dim_names=("dp",))
        fully_shard(model.into, mesh=mesh)
        fully_shard(model.out, mesh=mesh)
        if kind != "blocks":
            fully_shard(model, mesh=mesh)
        fully_shard(second, mesh=mesh)
        parameters = [*model.parameters(), *second.parameters()]
    step = Step({"one": model, "two": second}, torch.optim.SGD(parameters, lr=0.1), accumulate=accumulate)
    losses = []
    for _ in range(2):
        window = step.window(mine(batches(counts), replica, num_replicas))
        for inputs, _ in window:
            window.backward(_loss(kind, model, second, inputs), len(inputs))
        losses.append(window.step().loss)
    return {"parameters": [*flat(model), *flat(second)], "losses": losses}


def _loss(kind: str, model: Tower, second: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    if kind == "teacher":
        with torch.no_grad():
            wanted = second(model(inputs)) * 0.5
        return (second(model(inputs)) - wanted).square().sum()
    if kind == "unused output":
        model(inputs).detach()
    if kind == "twice":
        return (model(model(inputs).expand(-1, WIDTH)) + second(inputs[:, :1])).square().sum()
    if kind == "parts":
        return (model.out(model.into(inputs)) + second(inputs[:, :1])).square().sum()
    return (second(model(inputs))).square().sum()


def sharded_in_part(*, with_mesh: bool) -> str:
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    fully_shard(model.into, mesh=mesh)
    Step(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh if with_mesh else None)
    return "made"


def bad_gradient_of_one_rank_alone() -> dict[str, Any]:
    """A plain head whose gradients nobody exchanges here is infinite on one rank only."""
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    fully_shard(model.into, mesh=mesh)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    model.out.weight.register_hook(lambda gradient: gradient * (float("inf") if dist.get_rank() == 1 else 1.0))
    window = step.window(batches([3]))
    for batch in window:
        window.backward(loss_sum(model, batch), 3)
    return {"reason": window.step().reason.value}


def uneven_with_two_optimizers(counts: Sequence[int]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    models = {"g": fully_shard(nn.Linear(2, 2), mesh=mesh), "d": fully_shard(nn.Linear(2, 1), mesh=mesh)}
    step = Step(models, {name: torch.optim.SGD(model.parameters()) for name, model in models.items()})
    step.window(mine(batches(counts), dist.get_rank(), dist.get_world_size()))


def compiled(wrap: str, counts: Sequence[int]) -> dict[str, Any]:
    """A model that was compiled after it was wrapped; its wrapper hides from isinstance()."""
    model: nn.Module = net()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    fast = torch.compile(model, backend="eager")
    step = Step(fast, torch.optim.SGD(model.parameters(), lr=1.0))
    window = step.window(mine(batches(counts), dist.get_rank(), dist.get_world_size()))
    for batch in window:
        window.backward(loss_sum(fast, batch), len(batch[1]))
    window.step()
    return {"parameters": flat(model)}


def statistics_of_two_optimizers(num_windows: int) -> dict[str, Any]:
    """BatchNorm statistics of DDP's replicas right after the first forward of each window."""
    torch.manual_seed(4)
    norm = DistributedDataParallel(nn.BatchNorm1d(2))
    head = DistributedDataParallel(nn.Linear(2, 1))
    optimizers = {"g": torch.optim.SGD(norm.parameters(), lr=0.1), "d": torch.optim.SGD(head.parameters(), lr=0.1)}
    step = Step({"g": norm, "d": head}, optimizers)
    generator = torch.Generator().manual_seed(dist.get_rank())
    before = []
    norm.module.register_forward_pre_hook(lambda module, _: before.append(module.running_mean.tolist()))
    for _ in range(num_windows):
        window = step.window([torch.randn(4, 2, generator=generator)])
        for batch in window:
            features = norm(batch)
            window.backward(head(features.detach()).sum(), 4, of="d")
            window.backward(head(features).sum(), 4, of="g")
        window.step("d")
        window.step("g")
    return {"before": before}


def ddp_over_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"into": ColwiseParallel(), "out": RowwiseParallel()})
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    Step(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)


def complex_parameters(counts: Sequence[int]) -> dict[str, Any]:
    """A complex factor beside real layers, in one process or as DDP's replicas."""
    torch.manual_seed(6)
    inner = nn.Linear(WIDTH, 2).double()
    inner.register_parameter("phase", nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128)))
    alone = not dist.is_initialized()
    replica, num_replicas = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    model: nn.Module = inner if alone else DistributedDataParallel(_Phased(inner))
    forward = _Phased(inner) if alone else model
    step = Step(model, torch.optim.SGD(inner.parameters(), lr=0.1), max_norm=0.5)
    norms = []
    for _ in range(2):
        window = step.window(mine(batches(counts), replica, num_replicas))
        for inputs, _ in window:
            window.backward(forward(inputs), len(inputs))
        norms.append(window.step().grad_norm)
    return {
        "parameters": [*inner.weight.flatten().tolist(), *torch.view_as_real(inner.phase).flatten().tolist()],
        "norms": norms,
    }


class _Phased(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.inner.phase).abs().square().sum()


def bad_loss_of_a_compiled_run(path: str) -> list[str]:
    """Two windows of a run whose DDP model was compiled, the first bad on one rank: what is looked at then is local."""
    inner = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = torch.compile(DistributedDataParallel(inner), backend="eager")
    data = samerun.Data(batches([12])[0][0], global_batch=8, micro_batch=2, seed=1)
    reasons = []
    with samerun.Run(path, model=model, optimizer=torch.optim.SGD(inner.parameters(), lr=0.1), data=data) as run:
        for window in run.windows(until=1):
            for inputs in window:
                bad = window.index == 0 and dist.get_rank() == 1
                window.backward(model(inputs * float("nan") if bad else inputs).square().sum(), len(inputs))
            reasons.append(window.step().reason.value)
    return reasons
