"""Every optimizer of torch: capture → save → load into fresh objects → the next three updates are the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from samerun.checkpoint import Store
from samerun.core.progress import Progress
from samerun.errors import MismatchError, UsageError
from samerun.state.model import Weights
from samerun.state.optimizer import OptimizerMemory, named_groups
from samerun.state.schedule import Schedule
from samerun.storage.memory import Memory

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Odd(nn.Module):
    """Odd sizes, a tied weight, a frozen parameter, one that never has a gradient, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(7, 13)
        self.two = nn.Linear(7, 13, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.randn(()))


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(7, 13, bias=False)
        self.two = nn.Linear(13, 7, bias=False)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 7, sparse=True)


def all_of(kind: type[torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    one, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [one], "weight_decay": 0.0}, {"params": rest, "lr": 3e-2}], lr=1e-2)


O = torch.optim  # noqa: E741  # the table below is read column by column
CASES: dict[str, tuple[type[nn.Module], Make]] = {
    "Adadelta": (Odd, all_of(O.Adadelta)),
    "Adafactor": (Odd, all_of(O.Adafactor)),
    "Adagrad": (Odd, all_of(O.Adagrad, lr_decay=0.1)),
    "Adagrad-fused": (Odd, all_of(O.Adagrad, fused=True)),
    "Adam": (Odd, all_of(O.Adam)),
    "Adam-amsgrad": (Odd, all_of(O.Adam, amsgrad=True)),
    "Adam-foreach": (Odd, all_of(O.Adam, foreach=True)),
    "Adam-fused": (Odd, all_of(O.Adam, fused=True)),
    "Adam-tensor-lr": (Odd, lambda model: O.Adam(model.parameters(), lr=torch.tensor(1e-2), foreach=False)),
    "AdamW": (Odd, all_of(O.AdamW)),
    "AdamW-fused": (Odd, all_of(O.AdamW, fused=True, amsgrad=True)),
    "AdamW-two-groups": (Odd, two_groups),
    "Adamax": (Odd, all_of(O.Adamax)),
    "ASGD": (Odd, all_of(O.ASGD, t0=2)),
    "LBFGS": (Odd, all_of(O.LBFGS, max_iter=3)),
    "LBFGS-wolfe": (Odd, all_of(O.LBFGS, max_iter=4, line_search_fn="strong_wolfe")),
    "Muon": (Matrices, all_of(O.Muon)),
    "NAdam": (Odd, all_of(O.NAdam)),
    "RAdam": (Odd, all_of(O.RAdam)),
    "RMSprop": (Odd, all_of(O.RMSprop, momentum=0.9, centered=True)),
    "Rprop": (Odd, all_of(O.Rprop)),
    "SGD": (Odd, all_of(O.SGD, lr=1e-2)),
    "SGD-fused": (Odd, all_of(O.SGD, lr=1e-2, momentum=0.9, fused=True)),
    "SGD-nesterov": (Odd, all_of(O.SGD, lr=1e-2, momentum=0.9, nesterov=True)),
    "SparseAdam": (Sparse, all_of(O.SparseAdam)),
}
"""`capturable=True` is missing: torch accepts it on accelerators only."""


def update(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One update whose gradients depend on the parameters and on `number`, and on no global stream."""
    generator = torch.Generator().manual_seed(number)
    if isinstance(model, Sparse):
        rows = torch.randint(0, 13, (4,), generator=generator)
        target = torch.randn(4, 7, generator=generator)

        def loss() -> torch.Tensor:
            return ((model.table(rows) - target) ** 2).sum()
    else:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n != "unused"]
        targets = [torch.randn(p.shape, generator=generator) for _, p in trained]

        def loss() -> torch.Tensor:
            return torch.stack([((p - t) ** 2).sum() for (_, p), t in zip(trained, targets, strict=True)]).sum()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def build(case: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    make_model, make = CASES[case]
    model = make_model()
    return model, make(model)


def components(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    models, optimizers = {"model": model}, {"model": optimizer}
    return [
        Weights(models),
        OptimizerMemory(optimizers, models, steps=False),
        OptimizerMemory(optimizers, models, steps=True),
        Schedule(optimizers, {}, models),
    ]


def carry_over(source: list[Any], target: list[Any]) -> None:
    """Saves `source` and restores it into `target` through a real store; everything must be consumed."""
    store = Store(Memory())
    store.save({part.name: part.capture() for part in source}, Progress(), facts={}).result()
    with store.open(store.catalog().entries[0]) as checkpoint:
        for part in target:
            part.restore(checkpoint.source(part.name))
        assert checkpoint.unconsumed() == []


def flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        return [(str(dense.dtype), tuple(dense.shape), dense.contiguous().reshape(-1).view(torch.uint8).tolist())]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in ([key], *flat(value[key]))]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(leaf for item in value for leaf in flat(item))]
    return [(type(value).__name__, repr(value))]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Parameters, the optimizer's memory by parameter, and its groups' options, bit by bit."""
    memory = [dict(sorted(optimizer.state.get(p, {}).items())) for p in model.parameters()]
    options = [{k: v for k, v in sorted(group.items()) if k != "params"} for group in optimizer.param_groups]
    return [flat([p.detach() for p in model.parameters()]), flat(memory), flat(options)]


def test_no_optimizer_of_torch_is_missing() -> None:
    kinds = {n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n), type)} - {"Optimizer"}
    assert kinds <= {case.split("-")[0] for case in CASES}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_before", [0, 3])
def test_the_next_updates_are_the_same_bits(case: str, num_before: int) -> None:
    model, optimizer = build(case, seed=1)
    for number in range(num_before):
        update(model, optimizer, number)
    fresh, fresh_optimizer = build(case, seed=2)
    carry_over(components(model, optimizer), components(fresh, fresh_optimizer))
    assert everything(fresh, fresh_optimizer) == everything(model, optimizer)
    for number in range(num_before, num_before + 3):
        update(model, optimizer, number)
        update(fresh, fresh_optimizer, number)
        assert everything(fresh, fresh_optimizer) == everything(model, optimizer)


@pytest.mark.parametrize("left_out", ["moments", "steps"])
def test_control_a_half_that_is_left_out_changes_the_next_update(left_out: str) -> None:
    model, optimizer = build("Adam", seed=1)
    for number in range(3):
        update(model, optimizer, number)
    fresh, fresh_optimizer = build("Adam", seed=2)
    store = Store(Memory())
    store.save({part.name: part.capture() for part in components(model, optimizer)}, Progress(), facts={}).result()
    with store.open(store.catalog().entries[0]) as checkpoint:
        for part in components(fresh, fresh_optimizer):
            action = part.forget if part.name == left_out else part.restore
            action(checkpoint.source(part.name))
    update(model, optimizer, 3)
    update(fresh, fresh_optimizer, 3)
    assert everything(fresh, fresh_optimizer) != everything(model, optimizer)


def test_moments_keep_their_own_dtype() -> None:
    torch.manual_seed(1)
    model = nn.Linear(7, 13, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.randn(13, 7)  # fp32, as mixed-precision optimizers keep it
    fresh = nn.Linear(7, 13, dtype=torch.bfloat16)
    fresh_optimizer = torch.optim.Adam(fresh.parameters(), foreach=False)
    carry_over(components(model, optimizer), components(fresh, fresh_optimizer))
    assert fresh_optimizer.state[fresh.weight]["exp_avg"].dtype is torch.float32
    assert fresh_optimizer.state[fresh.weight]["exp_avg_sq"].dtype is torch.bfloat16
    assert everything(fresh, fresh_optimizer) == everything(model, optimizer)


def test_a_parameter_without_gradients_has_no_memory_afterwards() -> None:
    model, optimizer = build("Adam", seed=1)
    update(model, optimizer, 0)
    fresh, fresh_optimizer = build("Adam", seed=2)
    for number in range(2):  # the fresh side has a memory for every parameter that the saved one lacks
        for parameter in fresh.parameters():
            parameter.grad = torch.ones_like(parameter) * number
        fresh_optimizer.step()
    carry_over(components(model, optimizer), components(fresh, fresh_optimizer))
    assert not fresh_optimizer.state[fresh.unused]
    assert everything(fresh, fresh_optimizer) == everything(model, optimizer)


def test_memory_follows_names_not_places() -> None:
    model, optimizer = build("Adam", seed=1)
    update(model, optimizer, 0)
    fresh = Odd()
    other_order = torch.optim.Adam(list(fresh.parameters())[::-1])
    carry_over(components(model, optimizer)[:3], components(fresh, other_order)[:3])
    for name, parameter in model.named_parameters():
        other = dict(fresh.named_parameters())[name]
        mine, theirs = optimizer.state.get(parameter, {}), other_order.state.get(other, {})
        assert flat(dict(sorted(mine.items()))) == flat(dict(sorted(theirs.items())))


def test_a_foreign_parameter_is_refused_with_its_place() -> None:
    model, stranger = Odd(), nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.raises(UsageError, match=r"optimizer model: group 0 holds a parameter of shape \(3, 2\) that no model"):
        named_groups(optimizer, {"model": model}, which="model")


def test_saved_memory_without_a_parameter_names_component_and_key() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    store = Store(Memory())
    store.save({p.name: p.capture() for p in components(model, optimizer)}, Progress(), facts={}).result()
    smaller = nn.Sequential(nn.Linear(3, 3))
    memory = OptimizerMemory({"model": torch.optim.Adam(smaller.parameters())}, {"model": smaller}, steps=False)
    with (
        store.open(store.catalog().entries[0]) as checkpoint,
        pytest.raises(MismatchError, match=r"moments: the program has no 1\.bias, 1\.weight"),
    ):
        memory.restore(checkpoint.source("moments"))


def test_several_optimizers_keep_their_memories_apart() -> None:
    def make(seed: int) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        models: dict[str, nn.Module] = {"g": nn.Linear(3, 7), "d": nn.Linear(3, 7)}
        return models, {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}

    models, optimizers = make(1)
    for number, (name, model) in enumerate(models.items()):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizers[name].step()
    fresh, fresh_optimizers = make(2)
    parts, fresh_parts = (
        [Weights(m), OptimizerMemory(o, m, steps=False), OptimizerMemory(o, m, steps=True), Schedule(o, {}, m)]
        for m, o in ((models, optimizers), (fresh, fresh_optimizers))
    )
    assert set(parts[0].capture().tensors) == {"g/weight", "g/bias", "d/weight", "d/bias"}
    carry_over(parts, fresh_parts)
    for name, model in models.items():
        assert everything(fresh[name], fresh_optimizers[name]) == everything(model, optimizers[name])


class Counting(torch.optim.SGD):
    """Keeps something of its own, and says so in its state_dict."""

    calls = 0
    slow = torch.zeros(2)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.calls, self.slow = state.pop("calls"), state.pop("slow")
        super().load_state_dict(state)


def test_what_an_optimizer_keeps_beside_torchs_tables_comes_back() -> None:
    def made() -> tuple[nn.Module, Counting]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        return model, Counting(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    for _ in range(3):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float() + 1e-5  # torch's own loading would cast it
    optimizer.slow = torch.tensor([1.5, 2.5])
    store = Store(Memory())
    parts = [OptimizerMemory({"model": optimizer}, {"model": model}, steps=steps) for steps in (False, True)]
    store.save({part.name: part.capture() for part in parts}, Progress(), facts={}).result()
    model, fresh = made()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with store.open(store.catalog().entries[0]) as checkpoint:
        for steps in (False, True):
            part = OptimizerMemory({"model": fresh}, {"model": model}, steps=steps)
            part.restore(checkpoint.source(part.name))
        with pytest.raises(MismatchError, match=r"SGD.state_dict\(\): the program has no calls, slow"):
            OptimizerMemory({"model": plain}, {"model": model}, steps=False).restore(checkpoint.source("moments"))
    assert fresh.calls == 3 and fresh.slow.tolist() == [1.5, 2.5]
    for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert two["momentum_buffer"].dtype is torch.float32
        assert torch.equal(one["momentum_buffer"], two["momentum_buffer"])
