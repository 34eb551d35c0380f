"""Amounts with units: strict in, readable out, and never mixed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.units import (
    Amount,
    AmountUnit,
    Size,
    SizeBase,
    format_bytes,
    format_seconds,
    parse_amount,
    parse_seconds,
    parse_size,
)
from samerun.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10 min", 600.0),
        ("90s", 90.0),
        ("4h", 14400.0),
        ("250 ms", 0.25),
        ("1.5 d", 129600.0),
        (" 2e3 s ", 2000.0),
        ("0 s", 0.0),
        (12.5, 12.5),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["10", "ten min", "-1 s", "1 fortnight", "", "s", "1e999 s", math.nan, math.inf, "1 s s"]
)
def test_what_is_no_duration_is_refused_with_an_example(text: Any) -> None:
    with pytest.raises(UsageError, match=r"write it like|finite"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (59, "59 s"),
        (60, "1 min"),
        (225, "3 min 45 s"),
        (7.8 * 3600, "7.8 h"),
        (12.4 * 86400, "12.4 d"),
        (-90, "-1 min 30 s"),
        (math.inf, "never"),
    ],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0, 1e9))
def test_words_say_the_duration_within_a_hundredth(seconds: float) -> None:
    parts = re.findall(r"([\d.e+-]+) (s|min|h|d)", format_seconds(seconds))
    said = sum(float(number) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit] for number, unit in parts)
    assert said == pytest.approx(seconds, rel=0.01)  # three digits are shown


def test_gib_and_gb_are_different_sizes() -> None:
    assert parse_size("24GiB").num_bytes == 24 * 2**30
    assert parse_size("24 GB").num_bytes == 24 * 10**9
    assert parse_size("0.5kB") == Size(500, SizeBase.DECIMAL)
    with pytest.raises(TypeError, match="different bases"):
        parse_size("1GiB") + parse_size("1GB")
    with pytest.raises(TypeError, match="different bases"):
        _ = parse_size("1GiB") < parse_size("1GB")
    assert parse_size("1GiB") + parse_size("1GB").to(SizeBase.BINARY) == Size(2**30 + 10**9)
    assert parse_size("3GiB") - parse_size("1GiB") == parse_size("2GiB")
    assert parse_size("1GiB") <= parse_size("1GiB")


@pytest.mark.parametrize("text", ["24", "24 gb", "24G", "-1GiB", "GiB", "1e999GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_sizes_in_words() -> None:
    assert format_bytes(35e9, SizeBase.DECIMAL) == "35 GB"
    assert format_bytes(35e9) == "32.6 GiB"
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(5000 * 2**40) == "5000 TiB"
    assert str(Size(1000, SizeBase.DECIMAL)) == "1 kB"


@given(st.integers(0, 2**60), st.sampled_from(SizeBase))
def test_sizes_in_words_can_be_read_back(num_bytes: int, base: SizeBase) -> None:
    assert parse_size(format_bytes(num_bytes, base)).num_bytes == pytest.approx(num_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("500 updates", 500, AmountUnit.UPDATES),
        ("1 update", 1, AmountUnit.UPDATES),
        ("2e9 tokens", 2e9, AmountUnit.TOKENS),
        ("3 epochs", 3, AmountUnit.EPOCHS),
        ("0.5 epochs", 0.5, AmountUnit.EPOCHS),
        ("10 min", 600, AmountUnit.SECONDS),
        ("7 windows", 7, AmountUnit.WINDOWS),
    ],
)
def test_amounts(text: str, value: float, unit: AmountUnit) -> None:
    assert parse_amount(text) == Amount(value, unit)


def test_a_bare_number_needs_to_be_told_its_unit() -> None:
    assert parse_amount(2000, bare=AmountUnit.UPDATES) == Amount(2000, AmountUnit.UPDATES)
    with pytest.raises(UsageError, match="has no unit; write it like"):
        parse_amount(2000)


@pytest.mark.parametrize("text", ["0 updates", "-1 updates", "2.5 updates", "0 epochs", "5 parsecs", "many"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_amount(text)


def test_amounts_in_words() -> None:
    assert str(parse_amount("2e9 tokens")) == "2e+09 tokens"
    assert str(parse_amount("90s")) == "1 min 30 s"
