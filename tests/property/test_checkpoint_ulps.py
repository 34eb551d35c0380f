"""Distances in ulps against decoding every value: sorted neighbours are one apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from samerun.checkpoint.compare.ulps import FLOATS, Distance


def distance(left: np.ndarray, right: np.ndarray, dtype: str) -> Distance:  # type: ignore[type-arg]
    found = Distance()
    found.add(left, right, dtype)
    return found


@pytest.mark.parametrize("dtype", [name for name, form in FLOATS.items() if np.dtype(form.unsigned).itemsize <= 2])
def test_every_value_of_a_small_format_is_one_ulp_from_its_neighbour(dtype: str) -> None:
    unsigned = FLOATS[dtype].unsigned
    bits = np.arange(np.iinfo(unsigned).max + 1, dtype=np.uint64).astype(unsigned)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, dtype)).to(torch.float64).numpy()
    numbers = [(value, bit) for value, bit in zip(values, bits, strict=True) if not np.isnan(value)]
    numbers.sort(key=lambda pair: pair[0])
    ordered = np.array([bit for _, bit in numbers], dtype=unsigned)
    sizes = np.array([value for value, _ in numbers])
    steps = [
        distance(ordered[i : i + 1], ordered[i + 1 : i + 2], dtype).max_ulps for i in range(0, len(ordered) - 1, 7)
    ]
    apart = [sizes[i] != sizes[i + 1] for i in range(0, len(ordered) - 1, 7)]
    assert steps == [1 if a else (0 if x != y else None) for a, x, y in zip(
        apart, ordered[:-1:7], ordered[1::7], strict=True)]  # fmt: skip
    num_nan = int(np.isnan(values).sum())
    every = distance(bits, np.zeros_like(bits), dtype)
    assert every.num_nan_different == num_nan


@given(st.floats(width=32, allow_nan=False), st.integers(0, 40), st.booleans())
@example(-float(np.finfo(np.float32).max), 1, False)
@example(0.0, 3, True)
def test_float32_counts_the_steps_of_nextafter(start: float, steps: int, up: bool) -> None:
    a = np.array([start], dtype=np.float32)
    b = a.copy()
    taken = 0
    for _ in range(steps):
        with np.errstate(over="ignore"):  # the step beyond the largest number is infinity, as it should be
            after = np.nextafter(b, np.float32(np.inf if up else -np.inf))
        taken += int(after[0] != b[0])
        b = after
    found = distance(a.view(np.int32), b.view(np.int32), "float32")
    assert (found.max_ulps or 0) == taken


def test_far_apart_doubles_do_not_overflow() -> None:
    a, b = np.array([np.inf]), np.array([-np.inf])
    assert distance(a.view(np.int64), b.view(np.int64), "float64").max_ulps == 2 * 0x7FF0000000000000


def test_nans_ints_and_wide_elements() -> None:
    nan = np.array([np.nan, 1.0], dtype=np.float32)
    one = np.array([1.0, 1.0], dtype=np.float32)
    found = distance(nan.view(np.int32), one.view(np.int32), "float32")
    assert (found.num_different, found.num_nan_different, found.max_ulps) == (1, 1, None)
    assert distance(nan.view(np.int32), nan.view(np.int32), "float32").num_different == 0
    assert distance(np.array([1]), np.array([9]), "int64").max_ulps is None
    wide = np.array([1 + 2j, 3 + 0j])
    assert distance(wide, np.array([1 + 2j, 3 + 1j]), "complex128").num_different == 1
    assert distance(np.zeros((0, 3), np.int32), np.zeros((0, 3), np.int32), "float32").num_elements == 0
