"""The decision at an edge where a stop was agreed, and the check against the kill chain: the worked cases."""

from __future__ import annotations

import pytest

from samerun.plan.availability.deadline import Outcome, link
from samerun.preempt.budget import (
    TEARDOWN_SECONDS,
    Leave,
    Preemption,
    Slowest,
    assumed_links,
    check_budget,
    decide,
    describe_budget,
)
from samerun.preempt.sources import AwsSpotNotice


@pytest.mark.parametrize(
    ("seconds_left", "save_seconds", "expected"),
    [
        ([120.0, 120.0], 20.0, Leave.SAVE),
        ([90.0], 90.0, Leave.AT_ONCE),  # a ninety-second save in a ninety-second warning
        ([90.0 + TEARDOWN_SECONDS + 2.0], 90.0, Leave.SAVE),
        ([120.0, None, 5.0], 20.0, Leave.AT_ONCE),  # the nearest deadline of any rank counts
        ([None, None], 1e9, Leave.SAVE),  # nobody said how long there is
        ([1.0], None, Leave.SAVE),  # unmeasured: tried; a torn save is never loaded
        ([-3.0], 0.1, Leave.AT_ONCE),
    ],
)
def test_decide(seconds_left: list[float | None], save_seconds: float | None, expected: Leave) -> None:
    assert decide(seconds_left=seconds_left, save_seconds=save_seconds, margin_seconds=2.0) is expected


def test_the_limiting_link_is_named() -> None:
    links = Preemption(warning="600 s").links(launcher_seconds=30.0)
    plan = check_budget(links, window_seconds=10.0, save_seconds=25.0, margin_seconds=2.0)
    assert plan is not None
    assert plan.limiting_link == "torchrun"
    assert plan.verdict is Outcome.DROP_WINDOW
    sentence = describe_budget(plan)
    assert "has only 30 s of warning (limited by torchrun): an open window is dropped" in sentence
    assert "--shutdown-timeout 40" in sentence


def test_the_chain_is_what_the_plan_command_takes_and_unsaid_links_are_assumed() -> None:
    said = Preemption(chain=("kubernetes=600s",), sources=(AwsSpotNotice(),))
    links = said.links(launcher_seconds=300.0)
    assert links == (link("kubernetes=600s"), link("torchrun=300s"))
    assumed = assumed_links(said, links, ("kubernetes", "slurm-limit"))
    assert [each.name for each in assumed] == ["slurm-limit", "aws-spot"]
    plan = check_budget((*links, *assumed), window_seconds=10.0, save_seconds=25.0, margin_seconds=2.0)
    assert plan is not None and plan.limiting_link == "slurm-limit"
    assert "limited by slurm-limit, by its default: tell yours" in describe_budget(plan, assumed=assumed)
    assert assumed_links(Preemption(warning="60 s"), (), ("kubernetes",)) == ()


def test_a_stop_that_nothing_of_fits_says_what_is_lost() -> None:
    plan = check_budget((link("gcp-spot"),), window_seconds=10.0, save_seconds=60.0, margin_seconds=2.0)
    assert plan is not None
    assert "what was done since the last save would be lost" in describe_budget(plan)


def test_without_a_known_chain_nothing_is_claimed() -> None:
    assert check_budget((), window_seconds=1, save_seconds=1, margin_seconds=1) is None


def test_slowest_forgets_after_twenty() -> None:
    slowest = Slowest()
    assert slowest.seconds is None
    slowest.add(50.0)
    for _ in range(19):
        slowest.add(1.0)
    assert slowest.seconds == 50.0
    slowest.add(1.0)
    assert slowest.seconds == 1.0
