"""Plain state survives the trip through bytes exactly, and nothing but what was encoded decodes to it."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.canonical import canonical_bytes, decode_canonical
from samerun.errors import SchemaError, UsageError
from samerun.format.codec import MAX_DEPTH, MAX_INT_BITS, decode_plain, encode_plain

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), FLOATS, TEXT, st.binary(max_size=9)
)
KEYS = st.one_of(TEXT, st.integers(-5, 2**65), st.sampled_from(["$dict", "$", "", "z", "a"]))
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, st.integers(-3, 9), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def identical(left: Any, right: Any) -> bool:
    """Same types all the way down, same order of keys, same bits in floats."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, dict):
        return (
            len(left) == len(right)
            and all(type(a) is type(b) and a == b for a, b in zip(left, right, strict=True))
            and all(identical(left[key], right[key]) for key in left)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    return bool(left == right)


@given(PLAIN)
@settings(max_examples=400)
def test_every_plain_value_comes_back_identical(value: Any) -> None:
    data = canonical_bytes({"plain": encode_plain(value, "x")})
    tree = decode_canonical(data, where="x")
    assert identical(decode_plain(tree["plain"], "x"), value)
    assert canonical_bytes({"plain": encode_plain(decode_plain(tree["plain"], "x"), "x")}) == data


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(TEXT, inner, max_size=3),
        st.builds(
            lambda tag, body: {tag: body},
            st.sampled_from(["$dict", "$tuple", "$counter", "$bytes", "$float", "$x", "$"]),
            inner,
        ),
    ),
    max_leaves=10,
)


@given(JSON)
@settings(max_examples=400)
def test_any_json_either_decodes_to_what_encodes_back_or_is_refused(tree: Any) -> None:
    try:
        value = decode_plain(tree, "x")
    except SchemaError:
        return
    assert canonical_bytes(encode_plain(value, "x")) == canonical_bytes(tree)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"x\.a\.b\[1\]: builtins\.set"),
        ({"a": object()}, r"x\.a: builtins\.object"),
        ({1.5: 0}, "dict key of type float"),
        ({True: 0}, "dict key of type bool"),
        ({None: 0}, "dict key of type NoneType"),
        (lambda: 0, "builtins.function"),
        (1j, "builtins.complex"),
        ("\ud800", "lone surrogates"),
        (2 ** (MAX_INT_BITS + 1), "8194 bits"),
    ],
)
def test_what_is_not_plain_is_refused_by_path(value: Any, path: str) -> None:
    with pytest.raises(UsageError, match=path):
        encode_plain(value, "x")


def test_depth_is_bounded_on_both_sides() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert decode_plain(encode_plain(value, "x"), "x") == value
    with pytest.raises(UsageError, match="nested deeper"):
        encode_plain([value], "x")
    with pytest.raises(SchemaError, match="nested deeper"):
        decode_plain([value], "x")


def test_zero_keeps_its_sign_and_ints_do_not_become_floats() -> None:
    back = decode_plain(decode_canonical(canonical_bytes(encode_plain([-0.0, 0.0, 1, 1.0], "x")), where="x"), "x")
    assert isinstance(back, list)
    assert [math.copysign(1, item) for item in back[:2]] == [-1, 1]  # type: ignore[arg-type]
    assert [type(item) for item in back] == [float, float, int, float]
