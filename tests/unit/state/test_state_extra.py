"""The user's own components and plain trees: what comes back exactly, and what is refused by its path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.errors import MismatchError, UsageError
from samerun.state.extra import Extra
from samerun.state.fingerprint import fingerprint
from samerun.state.record import Record
from samerun.state.tree import join_tree, split_tree
from samerun.storage.memory import Memory


class Holder:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def through_a_store(source: Extra, target: Extra) -> None:
    store = Store(Memory())
    store.save({source.name: source.capture()}, Progress(), facts={}).result()
    with store.open(store.catalog().entries[0]) as checkpoint:
        target.restore(checkpoint.source(target.name))
        assert checkpoint.unconsumed() == []


def same(one: Any, other: Any) -> bool:
    """Equal and of the same types, NaN included, dict order apart."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


RICH = {
    "tensor": torch.arange(7, dtype=torch.int16),
    "scalar": torch.tensor(math.nan, dtype=torch.float64),
    "nested": [{"deep": torch.ones(2, 0)}, (1, 2.5, None, True, "text", b"\x00\xff")],
    "array": np.arange(5, dtype=np.uint8),
    "counts": Counter({3: 2, 5: 1}),
    "by number": {0: "zero", -1: "minus"},
    "limits": [math.inf, -math.inf, -0.0, 5e-324, 2**63, -(2**70)],
    "empty": {"dict": {}, "list": [], "tuple": (), "text": "", "bytes": b""},
}


def test_a_rich_state_comes_back_exactly() -> None:
    target = Holder({})
    through_a_store(Extra("mine", Holder(RICH)), Extra("mine", target))
    assert same(target.state, RICH)


NAMES = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), max_size=3)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(NAMES | st.integers(-9, 9), inner, max_size=3)
        | st.dictionaries(NAMES, st.integers(0, 9), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_any_plain_tree_survives_the_split(value: Any) -> None:
    plain, tensors = split_tree(value, path="")
    assert tensors == {}
    assert same(join_tree(plain, lambda key, host: torch.zeros(())), value)


@given(PLAIN, PLAIN)  # dots apart: a dotted key and a nested one have the same path
def test_different_trees_have_different_fingerprints(one: Any, other: Any) -> None:
    if not same(one, other):
        left, right = fingerprint(Captured(plain={"v": one})), fingerprint(Captured(plain={"v": other}))
        assert left != right
    assert fingerprint(Captured(plain=one)) == fingerprint(Captured(plain=one))


class Opaque:
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [Opaque()]}}, r"^a\.b\.0: a .*Opaque cannot be saved without running code"),
        ({"f": math.sqrt}, r"^f: a builtins\.builtin_function_or_method cannot be saved"),
        ({"s": {1, 2}}, r"^s: a builtins\.set cannot be saved"),
        ({"c": 1j}, r"^c: a builtins\.complex cannot be saved"),
        ({"o": np.array([None])}, r"^o: a numpy\.ndarray cannot be saved"),
        ({(1, 2): 0}, r"dict keys must be strings or integers, found tuple \(1, 2\)"),
        ({"d": {True: 0}}, r"^d: dict keys must be strings or integers, found bool True"),
        ({"__tensor__": 1}, r"the key '__tensor__' is reserved"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"^a\.b: two entries have this path"),
        ({"a": {1: torch.ones(1), "1": torch.ones(1)}}, r"^a\.1: two entries have this path"),
    ],
)
def test_what_would_need_code_or_be_ambiguous_is_refused_by_path(state: dict[Any, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Extra("mine", Holder(state)).capture()


def test_subclasses_of_plain_types_come_back_as_plain_types() -> None:
    target = Holder({})
    through_a_store(Extra("mine", Holder({"o": OrderedDict(a=1), "n": np.int64(3)})), Extra("mine", target))
    assert same(target.state, {"o": {"a": 1}, "n": 3})


def test_a_state_that_is_no_dict_is_refused_by_component() -> None:
    with pytest.raises(MismatchError, match=r"^mine: state_dict\(\) was a list, expected a dict"):
        through_a_store(Extra("mine", Holder([1])), Extra("mine", Holder({})))  # type: ignore[arg-type]


def test_a_module_that_misses_keys_is_an_error() -> None:
    class Lenient(nn.Linear):
        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state, strict=False, assign=assign)

    with pytest.raises(MismatchError, match=r"^ema: load_state_dict reports .*missing_keys=\['bias'\]"):
        through_a_store(Extra("ema", nn.Linear(2, 2, bias=False)), Extra("ema", Lenient(2, 2)))


def test_a_module_as_component_comes_back() -> None:
    source, target = nn.BatchNorm1d(7), nn.BatchNorm1d(7)
    source(torch.randn(5, 7))
    through_a_store(Extra("ema", source), Extra("ema", target))
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())


def test_a_record_gets_back_what_it_gave() -> None:
    got: list[Any] = []
    record = Record("loss", lambda: {"last": math.nan, "best": (1, 2)}, got.append)
    store = Store(Memory())
    store.save({"loss": record.capture()}, Progress(), facts={}).result()
    with store.open(store.catalog().entries[0]) as checkpoint:
        record.restore(checkpoint.source("loss"))
    assert same(got[0], {"last": math.nan, "best": (1, 2)})
