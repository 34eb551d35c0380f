"""Canonical JSON: one spelling for a value, and every other sequence of bytes refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.canonical import MAX_DEPTH, canonical_bytes, decode_canonical, sha256_hex
from samerun.errors import SchemaError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def decode(data: bytes, **more: Any) -> Any:
    return decode_canonical(data, where="file.json", **more)


@given(JSON)
def test_decoding_gives_back_the_value_and_its_types(value: Any) -> None:
    found = decode(canonical_bytes(value))
    assert repr(found) == repr(json.loads(json.dumps(value, sort_keys=True)))
    assert canonical_bytes(found) == canonical_bytes(value)


@given(JSON, st.data())
def test_any_changed_byte_is_refused_or_another_value(value: Any, data: st.DataObject) -> None:
    """One spelling per value: changed bytes can never decode to the same value."""
    spelled = bytearray(canonical_bytes(value))
    position = data.draw(st.integers(0, len(spelled) - 1))
    spelled[position] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(spelled))
    except SchemaError:
        return
    assert repr(found) != repr(decode(canonical_bytes(value)))


@given(JSON, st.data())
def test_cut_and_lengthened_documents_are_refused(value: Any, data: st.DataObject) -> None:
    spelled = canonical_bytes(value)
    with pytest.raises(SchemaError):
        decode(spelled[: data.draw(st.integers(0, len(spelled) - 1))])
    with pytest.raises(SchemaError):
        decode(spelled + data.draw(st.sampled_from([b" ", b"\n", b"\x00", b"{}"])))


@pytest.mark.parametrize(
    "data",
    [
        b'{"b":1,"a":2}\n',
        b'{"a": 1}\n',
        b'{"a":1}',
        b'{"a":1}\r\n',
        b'\xef\xbb\xbf{"a":1}\n',
        b'{"a":1,"a":1}\n',
        b'{"a":1.50}\n',
        b'{"a":1E5}\n',
        b'{"a":+1}\n',
        b'{"a":01}\n',
        b'{"a":-0}\n',
        b'{"a":NaN}\n',
        b'{"a":Infinity}\n',
        b'{"a":1e999}\n',
        b'{"a":"\\u0041"}\n',
        b'{"a":"\\/"}\n',
        b'{"a":"\xff"}\n',
        b'{"a":"\\ud800"}\n',
        b"\n",
        b"",
        b"{",
    ],
)
def test_what_a_lenient_parser_would_take_is_refused(data: bytes) -> None:
    with pytest.raises(SchemaError, match=r"^file\.json: "):
        decode(data)


def test_depth_is_bounded_without_recursion() -> None:
    assert decode(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"\n") is not None
    for data in (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"\n", b'{"a":' * 10**6, b"[" * 10**7):
        with pytest.raises(SchemaError, match="nested deeper than"):
            decode(data)


def test_brackets_inside_strings_are_no_depth() -> None:
    value = {"a": "[" * 1000, 'q"\\': ['\\"[[[', "{"]}
    assert decode(canonical_bytes(value)) == value


def test_size_is_bounded_before_parsing() -> None:
    with pytest.raises(SchemaError, match="101 bytes of JSON, at most 100"):
        decode(b" " * 101, max_bytes=100)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {1, 2}, b"x", object()])
def test_what_is_not_json_has_no_spelling(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        canonical_bytes({"a": value})


def test_sha256_is_the_published_one() -> None:
    assert sha256_hex(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
