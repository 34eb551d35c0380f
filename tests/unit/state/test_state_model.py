"""Weights and buffers: names that do not depend on wrapping, tied, frozen and odd ones, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samerun.checkpoint import Store
from samerun.core.progress import Progress
from samerun.errors import MismatchError
from samerun.state import names
from samerun.state.model import Buffers, Weights
from samerun.storage.memory import Memory


class Tied(nn.Module):
    def __init__(self, *, tie: bool = True, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 13, bias=False)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        if tie:
            self.head.weight = self.embedding.weight


def saved(*parts: Any) -> Store:
    store = Store(Memory())
    store.save({part.name: part.capture() for part in parts}, Progress(), facts={}).result()
    return store


def restore(store: Store, *parts: Any) -> list[str]:
    with store.open(store.catalog().entries[0]) as checkpoint:
        for part in parts:
            part.restore(checkpoint.source(part.name))
        return checkpoint.unconsumed()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = values(one), values(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_everything_a_forward_depends_on_comes_back() -> None:
    torch.manual_seed(1)
    model = Tied()
    model.norm(torch.randn(5, 7))  # moves the running statistics and the count of batches
    fresh = Tied()
    assert not same(model, fresh)
    store = saved(Weights({"m": model}), Buffers({"m": model}))
    assert restore(store, Weights({"m": fresh}), Buffers({"m": fresh})) == []
    assert same(model, fresh)
    assert fresh.head.weight is fresh.embedding.weight


def test_a_tied_parameter_is_stored_once_under_its_first_name() -> None:
    captured = Weights({"m": Tied()}).capture()
    assert "embedding.weight" in captured.tensors
    assert "head.weight" not in captured.tensors
    assert captured.plain == {"aliases": {"head.weight": "embedding.weight"}}


@pytest.mark.parametrize(("tied", "live"), [(True, False), (False, True)])
def test_other_ties_are_refused(tied: bool, live: bool) -> None:
    store = saved(Weights({"m": Tied(tie=tied)}))
    with pytest.raises(MismatchError, match=r"^weights: .*head\.weight"):
        restore(store, Weights({"m": Tied(tie=live)}))


def test_another_shape_is_refused_by_name_with_both_shapes() -> None:
    store = saved(Weights({"m": Tied(width=7)}))
    with pytest.raises(MismatchError, match=r"embedding\.weight.*13, 7|embedding\.weight.*13, 8"):
        restore(store, Weights({"m": Tied(width=8)}))


def test_other_names_are_refused_by_component_and_name() -> None:
    store = saved(Weights({"m": nn.Linear(3, 3)}), Buffers({"m": nn.BatchNorm1d(3)}))
    with pytest.raises(MismatchError, match=r"^weights: the program has no bias$"):
        restore(store, Weights({"m": nn.Linear(3, 3, bias=False)}))
    with pytest.raises(MismatchError, match=r"^buffers: the program has no num_batches_tracked, running_mean"):
        restore(store, Buffers({"m": nn.Linear(3, 3)}))
    with pytest.raises(MismatchError, match=r"^weights: the checkpoint lacks 0\.bias, 0\.weight; the program has no"):
        restore(store, Weights({"m": nn.Sequential(nn.Linear(3, 3))}))


def test_many_wrong_names_are_counted_not_listed() -> None:
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(7)))
    with pytest.raises(MismatchError, match="and 10 more"):
        restore(saved(Weights({"m": deep})), Weights({"m": nn.Module()}))


def test_torch_compile_does_not_change_names() -> None:
    model = Tied()
    compiled = torch.compile(model, backend="eager")  # never called: only its names matter here
    assert "_orig_mod.frozen" in dict(compiled.named_parameters())
    assert names.unwrap(compiled) is model
    assert names.parameters({"m": compiled}).keys() == names.parameters({"m": model}).keys()
    assert names.buffers({"m": compiled}).keys() == names.buffers({"m": model}).keys()
    fresh = Tied()
    assert restore(saved(Weights({"m": compiled})), Weights({"m": fresh})) == []
    assert torch.equal(fresh.frozen, model.frozen)


def test_a_compiled_part_inside_the_model_does_not_change_names() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    part = nn.Sequential(
        torch.compile(nn.Linear(2, 2), backend="eager"), torch.compile(nn.BatchNorm1d(2), backend="eager")
    )
    assert any("_orig_mod" in name for name, _ in part.named_parameters())
    assert names.parameters({"m": part}).keys() == names.parameters({"m": plain}).keys()
    assert names.buffers({"m": part}).keys() == names.buffers({"m": plain}).keys()


def test_several_models_are_kept_apart() -> None:
    torch.manual_seed(1)
    pair: dict[str, nn.Module] = {"g": nn.Linear(2, 3), "d": nn.Linear(2, 3)}
    assert set(names.parameters(pair)) == {"g/weight", "g/bias", "d/weight", "d/bias"}
    fresh: dict[str, nn.Module] = {"g": nn.Linear(2, 3), "d": nn.Linear(2, 3)}
    assert restore(saved(Weights(pair)), Weights(fresh)) == []
    assert all(same(pair[name], fresh[name]) for name in pair)


def test_a_parameter_shared_by_two_models_is_stored_once() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    captured = Weights({"a": first, "b": second}).capture()
    assert captured.plain == {"aliases": {"b/weight": "a/weight"}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_every_kind_of_number_keeps_its_bits(dtype: torch.dtype) -> None:
    model, fresh = nn.Module(), nn.Module()
    for owner in (model, fresh):
        owner.weight = nn.Parameter(torch.randn(7, 13).to(dtype))
        owner.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        owner.one = nn.Parameter(torch.randn(()).to(dtype))
    assert restore(saved(Weights({"m": model})), Weights({"m": fresh})) == []
    assert same(model, fresh)


def test_another_dtype_is_refused() -> None:
    store = saved(Weights({"m": nn.Linear(2, 2)}))
    with pytest.raises(MismatchError, match=r"weight.*float32|weight.*bfloat16"):
        restore(store, Weights({"m": nn.Linear(2, 2, dtype=torch.bfloat16)}))
