"""Fingerprints: any change shows, and shows under its own key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samerun.core.component import Captured
from samerun.state.fingerprint import fingerprint, tensor_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_one_changed_element_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.zeros(7, 13).to(dtype)
    before = tensor_digest(tensor)
    tensor[3, 5] = 1
    assert tensor_digest(tensor) != before
    tensor[3, 5] = 0
    assert tensor_digest(tensor) == before


def test_shape_and_dtype_are_part_of_it() -> None:
    zeros = torch.zeros(6)
    others = [zeros.reshape(2, 3), zeros.int(), zeros[:5], torch.zeros(0)]
    assert len({tensor_digest(tensor) for tensor in (zeros, *others)}) == 5


def test_strides_are_not() -> None:
    tensor = torch.arange(91).reshape(7, 13)
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor)


def test_minus_zero_and_nan_payloads_are_differences() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": [1]}, {"a": (1,)}),
        ({"a": {1: 2}}, {"a": {"1": 2}}),
        ({"a": {}}, {}),
        ({"a": {}}, {"a": None}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 1, "a": {"b": 3}}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 3, "a": {"b": 2}}),
        ({"[1]": 1}, {1: 1}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": b"x"}, {"a": "x"}),
        ({"a": "y" * 70}, {"a": "y" * 71}),
    ],
)
def test_plain_values_that_look_alike_differ(one: Any, other: Any) -> None:
    assert fingerprint(Captured(plain=one)) != fingerprint(Captured(plain=other))


def test_a_difference_shows_under_its_own_key() -> None:
    def digests(lr: float) -> dict[str, str]:
        return fingerprint(Captured(plain={"groups": {"g": {"lr": lr, "eps": 1e-8}}}, tensors={"w": torch.ones(2)}))

    one, other = digests(0.1), digests(0.2)
    assert {key for key in one if one[key] != other[key]} == {"groups.g.lr:"}
    assert one["groups.g.lr:"] == "0.1"
