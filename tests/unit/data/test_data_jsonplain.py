import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samerun.data.adapters.jsonplain import decode, encode
from samerun.errors import UsageError

KEYS = st.one_of(st.text(max_size=4), st.integers(-5, 5), st.just("$tuple"), st.just("$x"))
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=3)
    ),
)


@given(VALUES)
def test_decode_of_encode_is_identity(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize(
    "value",
    [np.int64(3), np.float32(0.1), np.str_("x"), {np.int64(3): 1}, Counter("aab"), np.array(5), np.bool_(True)],
)
def test_numbers_of_numpy_and_counters_come_back_as_what_they_were(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert type(back) is type(value) and back == value and repr(back) == repr(value)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_tensors_of_every_dtype_survive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.full(shape, 1.5).to(dtype)
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert (
        back.dtype is dtype and back.shape == shape and torch.equal(back.to(torch.complex64), value.to(torch.complex64))
    )


def test_bits_of_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(UsageError, match="'save'"):
        decode({"$bits": {"dtype": "save", "shape": [1], "data": "AAAA"}})


def test_tensors_arrays_and_nan_survive() -> None:
    state = {
        "t": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "a": np.float32([1.5, 2]),
        "nan": math.nan,
        "n": np.int64(3),
    }
    back = decode(json.loads(json.dumps(encode(state), allow_nan=False)))
    assert torch.equal(back["t"], state["t"]) and back["t"].dtype is torch.uint8
    assert back["a"].dtype == np.float32 and back["a"].tolist() == [1.5, 2.0]
    assert math.isnan(back["nan"]) and back["n"] == 3


def test_what_would_need_pickle_is_refused_by_path() -> None:
    with pytest.raises(UsageError, match=r"state\.workers\[1\] is a .*Random"):
        import random

        encode({"workers": [1, random.Random()]})
    with pytest.raises(UsageError, match="array of object"):
        encode({"x": np.array([object()])})
    for bad in ({"$code": "x"}, {"$array": {"dtype": "|O", "shape": [1], "data": ""}}):
        with pytest.raises(UsageError):
            decode(bad)
