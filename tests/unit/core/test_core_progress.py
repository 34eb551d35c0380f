"""Five counters that cannot be mixed, and what a window does to them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.progress import Count, Progress, Samples, Skipped, Tokens, Updates, Windows

KINDS: list[type[Count]] = [Windows, Skipped, Updates, Samples, Tokens]


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mod, operator.floordiv, operator.lt])
def test_different_counters_never_mix(one: type[Count], other: type[Count], operation: Any) -> None:
    if one is other:
        operation(one(7), other(3))
        return
    with pytest.raises(TypeError, match="are different counters and cannot be mixed"):
        operation(one(7), other(3))


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_comparing_different_counters_is_an_error_too(one: type[Count], other: type[Count]) -> None:
    if one is not other:
        with pytest.raises(TypeError):
            _ = one(7) == other(7)


def test_plain_integers_may_be_used() -> None:
    updates = Updates(200)
    assert updates % 100 == 0
    assert updates // 64 == 3
    assert updates + 1 == Updates(201)
    assert type(updates + 1) is Updates
    assert updates > 199 and updates >= 200 and updates < 201 and updates != 7
    assert (int(updates), f"{updates:06d}", str(updates), range(3)[Updates(2)]) == (200, "000200", "200", 2)
    assert not Updates() and Updates(1)


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_other_things_are_no_numbers(bad: Any) -> None:
    with pytest.raises(TypeError):
        Updates(1) + bad


def test_a_count_is_never_negative() -> None:
    with pytest.raises(ValueError, match="updates cannot be negative, got -1"):
        Updates(0) - 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 9999)), max_size=20))
def test_every_window_counts_in_the_right_places(windows: list[tuple[bool, int, int]]) -> None:
    progress = Progress()
    for updated, samples, tokens in windows:
        progress = progress.after(updated=updated, samples=samples, tokens=tokens)
    assert progress.windows == len(windows)
    assert progress.updates == sum(updated for updated, _, _ in windows)
    assert int(progress.skipped) + int(progress.updates) == int(progress.windows)
    assert progress.samples == sum(samples for _, samples, _ in windows)
    assert progress.tokens == sum(tokens for _, _, tokens in windows)
    assert Progress.from_json(progress.to_json()) == progress


@pytest.mark.parametrize("name", ["windows", "skipped", "updates", "samples", "tokens"])
def test_progress_is_all_five_counters(name: str) -> None:
    value = Progress().to_json()
    del value[name]
    with pytest.raises(ValueError, match="progress has the counters"):
        Progress.from_json(value)
    with pytest.raises(ValueError, match="progress has the counters"):
        Progress.from_json({**Progress().to_json(), "steps": 1})
