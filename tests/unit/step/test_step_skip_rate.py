"""The rolling skip rate against a list, its alert, and its way through a checkpoint."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from samerun.step.skip_rate import SkipRate


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 1200))
def test_equals_the_share_of_the_last_thousand(skips: list[bool], num_clean: int) -> None:
    rate = SkipRate()
    seen = [*skips, *([False] * num_clean), *skips]
    for skipped in seen:
        rate.after(skipped=skipped)
    last = seen[-1000:]
    assert rate.num_windows == len(last)
    assert rate.value == (sum(last) / len(last) if last else 0.0)


def alerts(skips: list[bool]) -> list[int]:
    rate = SkipRate()
    return [number for number, skipped in enumerate(skips) if rate.after(skipped=skipped) is not None]


def test_says_it_once_per_crossing() -> None:
    clean, skip = [False], [True]
    assert alerts(clean * 950 + skip * 50) == []  # 5 % is not above 5 %
    assert alerts(clean * 950 + skip * 51) == [1000]
    assert alerts(clean * 950 + skip * 90) == [1000]
    again = clean * 950 + skip * 51 + clean * 1000 + skip * 51
    assert alerts(again) == [1000, 2051]


def test_a_scale_that_finds_its_level_is_no_alarm() -> None:
    assert alerts([True] * 5 + [False] * 2000) == []
    assert alerts([True] * 6) == [5]


def test_the_sentence_says_how_many() -> None:
    rate = SkipRate()
    said = [rate.after(skipped=True) for _ in range(6)]
    assert said[-1] is not None
    assert said[-1].startswith("6 of the last 6 windows were skipped, more than 5%")


@given(st.lists(st.booleans(), max_size=80), st.lists(st.booleans(), max_size=80))
def test_goes_on_after_a_resume_as_if_nothing_had_happened(before: list[bool], after: list[bool]) -> None:
    twin, first, resumed = SkipRate(), SkipRate(), SkipRate()
    for skipped in before:
        twin.after(skipped=skipped)
        first.after(skipped=skipped)
    resumed.load_state_dict(first.state_dict())
    for skipped in after:
        assert twin.after(skipped=skipped) == resumed.after(skipped=skipped)
    assert resumed.state_dict() == twin.state_dict()
    assert resumed.value == twin.value


def test_state_is_short() -> None:
    rate = SkipRate()
    for number in range(5000):
        rate.after(skipped=number % 100 == 0)
    assert len(str(rate.state_dict())) < 300


def test_a_good_window_between_two_bad_ones_is_no_new_crossing() -> None:
    rate = SkipRate()
    alerts = [rate.after(skipped=skipped) for skipped in [False] * 100 + [True, False] * 20]
    assert rate.value > 0.05
    assert sum(alert is not None for alert in alerts) == 1
    quiet = [rate.after(skipped=False) for _ in range(1000)]
    assert rate.value < 0.05 and quiet == [None] * 1000
    again = [rate.after(skipped=True) for _ in range(60)]
    assert sum(alert is not None for alert in again) == 1
