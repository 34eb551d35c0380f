"""What ranks of the pool do for the tests of the step: one window over given microbatches, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from samerun.step import Step
from samerun.step.outcome import Outcome

WIDTH, CLASSES = 7, 5
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two layers, an optional BatchNorm between them; registered in another order than they run."""

    def __init__(self, *, norm: bool = False, hidden: int = 12) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, CLASSES)
        self.into = nn.Linear(WIDTH, hidden)
        self.norm = nn.BatchNorm1d(hidden) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.tanh(self.norm(self.into(x))))
        return logits


def net(*, norm: bool = False, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(11)
    return Net(norm=norm).to(dtype)


def batches(counts: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Batch]:
    """One microbatch for each count of supervised tokens; the data of microbatch k depends on k only."""
    made = []
    for number, count in enumerate(counts):
        generator = torch.Generator().manual_seed(100 + number)
        inputs = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) * (1 + number)
        made.append((inputs.to(dtype), torch.randint(0, CLASSES, (count,), generator=generator)))
    return made


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def mine(items: Sequence[Any], replica: int, num_replicas: int) -> list[Any]:
    return list(items[replica::num_replicas])


def wrapped(model: nn.Module, how: str) -> tuple[nn.Module, DeviceMesh | None, int, int]:
    """(model, mesh= for the step, replica, replicas)."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if how == "solo":
        return model, None, 0, 1
    if how == "ddp":
        return DistributedDataParallel(model), None, rank, world
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        return fully_shard(model, mesh=mesh), None, rank, world
    assert how == "tp"
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"into": ColwiseParallel(), "out": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"]), mesh, mesh.get_local_rank("dp"), world // 2


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(model: nn.Module) -> list[float]:
    """Every parameter of the unwrapped model, in one list, gathered where sharded."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    parts = [whole(parameter.detach()).double().flatten() for parameter in inner.parameters()]
    return torch.cat(parts).tolist()


def facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "reason": outcome.reason.value,
        "loss": outcome.loss,
        "norm": outcome.grad_norm,
        "clipped": outcome.grad_norm_clipped,
        "weight": outcome.weight,
        "scale": outcome.scale,
        "lr": outcome.lr,
    }


def big_batch(counts: Sequence[int]) -> tuple[torch.Tensor, float, float]:
    """(parameters after SGD with rate 1 on the mean over all tokens at once, loss, gradient norm)."""
    model = net()
    parts = batches(counts)
    logits = model(torch.cat([inputs for inputs, _ in parts]))
    loss = F.cross_entropy(logits, torch.cat([targets for _, targets in parts]))
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return torch.tensor(flat(model), dtype=torch.float64), float(loss.detach()), float(norm)


def one_window(
    wrap: str,
    counts: Sequence[int],
    *,
    accumulate: str = "sharded",
    max_norm: float | None = None,
    precision: str = "fp32",
    tensor_weight: bool = False,
) -> dict[str, Any]:
    """SGD with rate 1: the parameters afterwards are those before less the gradient that the step used."""
    dtype = torch.float64 if precision == "fp32" else torch.float32
    model, mesh, replica, num_replicas = wrapped(net(dtype=dtype), wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = Step(model, optimizer, mesh=mesh, accumulate=accumulate, max_norm=max_norm, precision=precision)
    own = mine(batches(counts, dtype), replica, num_replicas)
    window = step.window(own)
    for batch in window:
        count = len(batch[1])
        window.backward(loss_sum(model, batch), torch.tensor(count) if tensor_weight else count)
    outcome = window.step()
    return {"parameters": flat(model), "progress": step.progress.to_json(), **facts(outcome)}


def many_windows(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one_window(**case) for case in cases]


def skips(wrap: str, kind: str, bad_rank: int, *, precision: str = "fp32") -> dict[str, Any]:
    """One good window, then one that is bad on one rank only; then a good one again."""
    model, mesh, replica, num_replicas = wrapped(net(norm=True, dtype=torch.float32), wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    step = Step(model, optimizer, mesh=mesh, precision=precision)
    rank = dist.get_rank() if dist.is_initialized() else 0
    seen = []
    for number, bad in enumerate((False, True, False)):
        own = mine(batches([6, 4, 5, 7, 3, 2], torch.float32), replica, num_replicas)
        window = step.window(own)
        before = _snapshot(model, optimizer)
        for slot, batch in enumerate(window):
            hurt = bad and rank == bad_rank and slot == 0
            inputs = batch[0] * float("inf") if hurt and kind == "input" else batch[0]
            loss = loss_sum(model, (inputs, batch[1]))
            if hurt and kind == "loss":
                loss = loss * float("nan")
            if hurt and kind == "gradient":
                loss = Poisoned.apply(loss)
            window.backward(loss, len(batch[1]))
        outcome = window.step()
        after = _snapshot(model, optimizer)
        seen.append({"same": _equal(before, after), "number": number, **facts(outcome)})
    state = step.state_dict()
    return {"windows": seen, "parameters": flat(model), "state": state}


class Poisoned(torch.autograd.Function):
    """A finite loss whose gradient is not."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * math.inf


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [_local(tensor.detach()).clone() for tensor in tensors]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _equal(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(
        torch.equal(one.nan_to_num(7), two.nan_to_num(7)) and bool(torch.isfinite(two).all())
        for one, two in zip(before, after, strict=True)
    )


def mixed_norm() -> dict[str, Any]:
    """A sharded body under a replicated head that FSDP ignores: DTensor and plain gradients in one norm."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = net()
    plain = set(model.out.parameters())
    fully_shard(model, mesh=mesh, ignored_params=plain)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = Step(model, optimizer, mesh=mesh, max_norm=0.1)  # mesh=: the plain ones are averaged by somebody else
    batch = batches([9])[0]
    window = step.window([batch])  # the same batch on every rank: the plain gradients are equal without a reduction
    for each in window:
        window.backward(loss_sum(model, each), 9)
    outcome = window.step()
    return {"parameters": flat(model), **facts(outcome)}


def fp16_scale_start(wrap: str, counts: Sequence[int], num_windows: int) -> dict[str, Any]:
    """The loss scale's shift before, in and after the first windows."""
    model, mesh, replica, num_replicas = wrapped(net(dtype=torch.float32), wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = Step(model, optimizer, mesh=mesh, precision="fp16")
    shifts = [step.state_dict()["scaler"]["shift"]]
    outcomes = []
    for _ in range(num_windows):
        window = step.window(mine(batches(counts, torch.float32), replica, num_replicas))
        for batch in window:
            window.backward(loss_sum(model, batch), len(batch[1]))
            shifts.append(step.state_dict()["scaler"]["shift"])
        outcomes.append(facts(window.step()))
    return {"shifts": shifts, "outcomes": outcomes}


def gan(wrap: str, num_windows: int) -> dict[str, Any]:
    """Two models that train against each other, one optimizer each."""
    torch.manual_seed(5)
    generator, critic = nn.Linear(3, WIDTH).double(), net()
    replica, num_replicas = 0, 1
    if wrap == "ddp":
        generator, critic = DistributedDataParallel(generator), DistributedDataParallel(critic)
        replica, num_replicas = dist.get_rank(), dist.get_world_size()
    optimizers = {
        "g": torch.optim.SGD(generator.parameters(), lr=0.1),
        "d": torch.optim.SGD(critic.parameters(), lr=0.2),
    }
    step = Step({"g": generator, "d": critic}, optimizers)
    seen = []
    for number in range(num_windows):
        window = step.window(mine(gan_data(number), replica, num_replicas))
        for real, noise in window:
            fake = generator(noise)
            d_loss = critic(real).square().sum() + (critic(fake.detach()) - 1).square().sum()
            window.backward(d_loss, len(real), of="d")
        seen.append(facts(window.step("d")))
        for _, noise in mine(gan_data(number), replica, num_replicas):
            window.backward(critic(generator(noise)).square().sum(), len(noise), of="g")
        seen.append(facts(window.step("g")))
    return {"g": flat(generator), "d": flat(critic), "outcomes": seen, "progress": step.progress.to_json()}


def gan_data(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(number)
    return [
        (
            torch.randn(count, WIDTH, generator=rng, dtype=torch.float64),
            torch.randn(count, 3, generator=rng, dtype=torch.float64),
        )
        for count in (4, 2, 1, 6)
    ]


def ten_updates(wrap: str) -> dict[str, Any]:
    """Runs on a rank: how far schedulers come in ten updates."""
    model, mesh, replica, num_replicas = wrapped(net(), wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = Step(model, optimizer, mesh=mesh, scheduler=scheduler)
    for _ in range(10):
        window = step.window(mine(batches([2, 1, 2, 1]), replica, num_replicas))
        for batch in window:
            window.backward(loss_sum(model, batch), len(batch[1]))
        window.step()
    return {"count": scheduler.last_epoch, "lr": optimizer.param_groups[0]["lr"]}


def context_parallel(counts: Sequence[int]) -> dict[str, Any]:
    """One example split over all ranks: each holds its own tokens, FSDP2 shards over dp and cp together."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    model = fully_shard(net(), mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0), mesh=mesh)
    own = batches(counts)[dist.get_rank()]
    window = step.window([own])
    for batch in window:
        window.backward(loss_sum(model, batch), len(batch[1]))
    outcome = window.step()
    return {"parameters": flat(model), "progress": step.progress.to_json(), **facts(outcome)}


def bf16_sums(wrap: str) -> float:
    """The gradient of one bf16 weight over windows' microbatches of 256, 1, 1 and 2."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(model.weight)
    model, mesh, replica, num_replicas = wrapped(model, wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = Step(model, optimizer, mesh=mesh)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(float(whole(o.param_groups[0]["params"][0].grad))))
    inputs = mine([256.0, 1.0, 1.0, 2.0], replica, num_replicas)
    window = step.window(inputs)
    for value in window:
        window.backward(model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum(), 1 / 4)
    window.step()
    return seen[0]


def empty_batch_on_one_rank(counts: Sequence[int]) -> dict[str, Any]:
    """A rank whose only microbatch is all padding: the forward runs on rows that no loss looks at."""
    model = DistributedDataParallel(net())
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    count = counts[dist.get_rank()]
    window = step.window([batches(counts)[dist.get_rank()]])
    for inputs, targets in window:
        rows, labels = (inputs, targets) if count else (torch.ones(2, WIDTH).double(), torch.tensor([-100, -100]))
        window.backward(F.cross_entropy(model(rows), labels, reduction="sum"), count)
    outcome = window.step()
    return {"parameters": flat(model), **facts(outcome)}


def plateau(path: str) -> dict[str, Any]:
    """One metric, measured on every rank, steps a plateau scheduler once."""
    import samerun

    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    data = samerun.Data(torch.utils.data.TensorDataset(*batches([16])[0]), global_batch=4, micro_batch=1, seed=1)
    with samerun.Run(path, model=model, optimizer=optimizer, scheduler=scheduler, data=data) as run:
        for window in run.windows(until=3):
            for batch in window:
                window.backward(loss_sum(model, batch), len(batch[1]))
            window.step()
            run.evaluate("val_loss", lambda: 1.0)
    return {"count": scheduler.last_epoch, "lr": optimizer.param_groups[0]["lr"]}


def exchanges(wrap: str, accumulate: str, num_microbatches: int) -> list[int]:
    """How often gradients are exchanged in each of three windows."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model, mesh, _, _ = wrapped(net(), wrap)
    count = 0
    reduce_scatter = dist.reduce_scatter_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return reduce_scatter(*args, **kwargs)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks the annotations, as objects
        nonlocal count
        count += bucket.is_last()
        return allreduce_hook(state, bucket)

    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, hook)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, accumulate=accumulate)
    dist.reduce_scatter_single = counted
    seen = []
    try:
        for _ in range(3):
            count = 0
            window = step.window(batches([3] * num_microbatches))
            for batch in window:
                window.backward(loss_sum(model, batch), 3)
            window.step()
            seen.append(count)
    finally:
        dist.reduce_scatter_single = reduce_scatter
    return seen
