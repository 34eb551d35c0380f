import json

import pytest

from samerun.data.cursor import make_cursor
from samerun.data.elastic import Policy, Share, accepted, decide, parse_policy
from samerun.data.source import Guarantee
from samerun.errors import UsageError

IDENTITY = {"num_samples": 100, "global_batch": 8, "micro_batch": 2, "epoch_end": "straddle"}


def share(
    replicas: int = 1,
    *,
    guarantee: Guarantee = Guarantee.EXACT,
    shared: bool = True,
    even: bool = True,
    **change: object,
) -> Share:
    return Share(guarantee=guarantee, replicas=replicas, shared=shared, even=even, identity=IDENTITY | change)


def test_other_replica_counts_are_exact_on_one_global_stream() -> None:
    for before, after in ((4, 2), (2, 3), (3, 8), (8, 1)):
        decision = decide(share(before), share(after), position=40, allowed=())
        assert decision.policy is Policy.EXACT and decision.position == 40
        assert (decision.replayed, decision.repeated_at_most, decision.lost_at_most) == (0, 0, 0)
        assert f"{before} replicas became {after}" in decision.reason


def test_another_batch_is_rebatched_only_when_allowed() -> None:
    changed = share(global_batch=12)
    refused = decide(share(), changed, position=40, allowed=())
    assert refused.policy is Policy.REFUSE and "global_batch was 8 and is now 12" in refused.reason
    assert "on_change='rebatch'" in refused.reason
    assert decide(share(), changed, position=40, allowed=[Policy.REBATCH]).policy is Policy.REBATCH


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (share(), share(num_samples=101)),
        (share(epoch_end="drop_tail"), share(epoch_end="drop_tail", global_batch=12)),
        (share(), share(guarantee=Guarantee.REPLAY)),
        (share(shared=True), share(shared=False)),
        (share(guarantee=Guarantee.REPLAY), share(guarantee=Guarantee.REPLAY, micro_batch=4)),
    ],
)
def test_everything_else_is_refused_whatever_is_allowed(saved: Share, now: Share) -> None:
    assert decide(saved, now, position=40, allowed=set(Policy)).policy is Policy.REFUSE


def test_a_source_without_state_replays_and_says_how_much() -> None:
    replay = share(guarantee=Guarantee.REPLAY)
    decision = decide(replay, replay, position=40, allowed=(), consumed=40)
    assert (decision.policy, decision.replayed) == (Policy.REPLAY, 40) and "40 items" in decision.reason


@pytest.mark.parametrize(("before", "after", "position"), [(4, 3, 40), (2, 8, 6), (8, 2, 16), (3, 7, 21), (1, 5, 0)])
def test_streams_of_their_own_have_bounds(before: int, after: int, position: int) -> None:
    """Oracle: deal 0 … 99 item by item, read `position` of them, deal the rest again, count repeats and losses."""
    saved, now = (share(count, guarantee=Guarantee.SNAPSHOT, shared=False) for count in (before, after))
    assert decide(saved, now, position=position, allowed=()).policy is Policy.REFUSE
    read = set(range(position))
    for policy in (Policy.AT_LEAST_ONCE, Policy.AT_MOST_ONCE):
        decision = decide(saved, now, position=position, allowed=[policy])
        assert decision.policy is policy and decision.position % after == 0
        per_stream = decision.position // after
        again = {item for r in range(after) for item in range(100)[r::after][per_stream:]}
        assert len(read & again) == decision.repeated_at_most < after
        assert len(set(range(100)) - read - again) == decision.lost_at_most < after


def test_unevenly_read_streams_have_no_bound() -> None:
    saved, now = (share(count, guarantee=Guarantee.SNAPSHOT, shared=False, even=False) for count in (3, 2))
    assert decide(saved, now, position=5, allowed=set(Policy)).policy is Policy.REFUSE


def test_decisions_are_records() -> None:
    decision = decide(share(4), share(2), position=40, allowed=())
    assert json.loads(json.dumps(decision.to_json())) == {
        "policy": "exact",
        "reason": "4 replicas became 2; every position continues where it was",
        "position": 40,
        "replayed": 0,
        "repeated_at_most": 0,
        "lost_at_most": 0,
    }
    assert accepted(decision) is decision
    with pytest.raises(UsageError, match="num_samples was 100 and is now 7"):
        accepted(decide(share(), share(num_samples=7), position=1, allowed=()))


def test_policies_are_named() -> None:
    assert parse_policy("rebatch", offered=[Policy.REBATCH]) is Policy.REBATCH
    for wrong in ("sometimes", "replay"):
        with pytest.raises(UsageError, match=rf"on_change='{wrong}'.*\['exact', 'rebatch'\]"):
            parse_policy(wrong, offered=[Policy.EXACT, Policy.REBATCH])


def test_rebatch_keeps_the_position_and_records_the_change() -> None:
    """Changed batch on resume: each sample still once, and the position is not restarted or rounded."""
    one = make_cursor(100, global_batch=8, micro_batch=2, seed=7, epoch_end="straddle")
    for _ in range(5):
        one.commit()
    two = make_cursor(100, global_batch=12, micro_batch=3, seed=7, epoch_end="straddle", on_change="rebatch")
    assert two.changeable == {"global_batch", "micro_batch"} and one.changeable == set()
    two.load_state_dict(one.state_dict())
    assert two.decision is not None and two.decision.policy is Policy.REBATCH
    two.commit()
    state = two.state_dict()
    assert (state["position"], state["windows"], state["samples"]) == (52, 6, 52)
    assert state["changes"] == [[40, 8, 2]]
    third = make_cursor(100, global_batch=12, micro_batch=3, seed=7, epoch_end="straddle")
    third.load_state_dict(json.loads(json.dumps(state)))
    assert third.state_dict() == state and third.decision is not None and third.decision.policy is Policy.EXACT
    single = make_cursor(100, global_batch=52, micro_batch=4, seed=7, epoch_end="straddle")
    single.commit()
    assert single.state_dict()["coverage"] == state["coverage"], "52 samples, each once"
