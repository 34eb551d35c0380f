import json
from dataclasses import replace

import pytest

from samerun.data import Data, DataWindow, Replica
from samerun.data.cursor import Cursor, make_cursor
from samerun.errors import UsageError


def cursor(n: int = 10, **options: object) -> Cursor:
    arguments = {"global_batch": 4, "micro_batch": 2, "seed": 7, "epoch_end": "straddle", **options}
    return make_cursor(n, **arguments)  # type: ignore[arg-type]


def committed(num_windows: int, **options: object) -> Cursor:
    result = cursor(**options)  # type: ignore[arg-type]
    for _ in range(num_windows):
        result.commit()
    return result


@pytest.mark.parametrize("num_windows", [0, 1, 5, 13])
@pytest.mark.parametrize("options", [{}, {"skip": [(3, 9), (30, 31)]}, {"epoch_end": "drop_tail"}])
def test_load_of_save_is_identity(num_windows: int, options: dict) -> None:
    saved = json.loads(json.dumps(committed(num_windows, **options).state_dict()))
    fresh = cursor(**options)
    fresh.load_state_dict(saved)
    assert fresh.state_dict() == saved
    fresh.commit()
    assert fresh.state_dict() == committed(num_windows + 1, **options).state_dict()


def test_state_is_small_at_any_position() -> None:
    far = cursor(10**12, global_batch=4096, fingerprint="f" * 64, skip=[(i * 10**11, i * 10**11 + 9) for i in range(9)])
    state = far.state_dict() | {"position": 10**18, "samples": 10**18 - 81, "windows": 10**15, "coverage": "f" * 16}
    assert len(json.dumps(state)) < 1024
    far.load_state_dict(state)
    far.commit()
    assert far.positions.committed == 10**18 + 4096


def test_only_committed_moves_the_saved_position() -> None:
    one = cursor()
    before = one.state_dict()
    plans = one.own_microbatches()
    for _ in range(9):
        next(plans)
    assert one.state_dict() == before
    assert (one.positions.produced, one.positions.delivered, one.positions.committed) == (18, 0, 0)
    one.commit()
    assert one.state_dict()["position"] == 4
    assert (one.positions.produced, one.positions.delivered, one.positions.committed) == (18, 4, 4)


def test_the_example_of_the_cheat_sheet() -> None:
    """Update 1840 of batch 64 means position 117,760."""
    saved = committed(1840, n=200_000, global_batch=64, micro_batch=2).state_dict()
    assert (saved["position"], saved["windows"], saved["samples"]) == (117_760, 1840, 117_760)


def test_windows_are_committed_once_and_in_order() -> None:
    with Data(range(10), global_batch=4, micro_batch=2) as data:
        windows = data.windows()
        first, second = next(windows), next(windows)
        with pytest.raises(UsageError, match=r"got window 1.*next undecided window is 0"):
            data.commit(second)
        data.commit(first)
        with pytest.raises(UsageError, match=r"got window 0, positions \[0, 4\).*window is 1, positions \[4, 8\)"):
            data.commit(first)
        shifted = replace(second, start=5)
        assert isinstance(shifted, DataWindow)
        with pytest.raises(UsageError, match=r"positions \[5, 8\)"):
            data.commit(shifted)
        data.commit(second)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 11}, "num_samples was 10 and is now 11"),
        ({"seed": 8}, "seed was 7 and is now 8"),
        ({"fingerprint": "v2"}, "fingerprint was '' and is now 'v2'"),
        ({"global_batch": 6}, "global_batch was 4 and is now 6"),
        ({"micro_batch": 1}, "micro_batch was 2 and is now 1"),
        ({"epoch_end": "drop_tail"}, "epoch_end was 'straddle' and is now 'drop_tail'"),
    ],
)
def test_changed_data_is_refused_with_both_values(change: dict, words: str) -> None:
    saved = committed(1).state_dict()
    with pytest.raises(UsageError, match=words):
        cursor(**change).load_state_dict(saved)


@pytest.mark.parametrize(
    "damage",
    [
        {"schema": "ckpt.data.v9"}, {"position": -1}, {"position": 1.0}, {"position": True}, {"position": 2**63},
        {"samples": 5}, {"windows": "1"}, {"coverage": "xyz"}, {"coverage": 5}, {"coverage": "-1"}, {"skip": [[5, 3]]},
        {"skip": [[0, 9], [5, 12]]}, {"skip": 3}, {"unit": "document"}, {"more": 1},
        {"changes": [[1, 2]]}, {"changes": 1},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict) -> None:
    one = cursor()
    before = one.state_dict()
    with pytest.raises(UsageError):
        one.load_state_dict(committed(1).state_dict() | damage)
    for wrong in (None, [], {}, {"schema": "ckpt.data.v1"}):
        with pytest.raises(UsageError):
            one.load_state_dict(wrong)  # type: ignore[arg-type]
    assert one.state_dict() == before


def test_state_after_iteration_began_is_refused() -> None:
    """A loader whose workers prefetch from 0 before the state arrives."""
    saved = committed(1).state_dict()
    one = cursor()
    next(one.own_microbatches())
    with pytest.raises(UsageError, match="already iterated"):
        one.load_state_dict(saved)
    one.restart()
    one.load_state_dict(saved)
    for _ in range(3):
        one.commit()
    one.restart()
    one.load_state_dict(cursor().state_dict())
    assert (one.positions.produced, one.positions.delivered, one.positions.committed) == (0, 0, 0)


def test_new_skip_ranges_may_only_lie_ahead() -> None:
    saved = committed(2, n=100, skip=[(2, 4)]).state_dict()
    assert saved["position"] == 10
    ahead = cursor(100, skip=[(2, 4), (10, 14)])
    ahead.load_state_dict(saved)
    assert ahead.state_dict()["skip"] == [[2, 4], [10, 14]]
    kept = cursor(100)
    kept.load_state_dict(saved)
    assert kept.state_dict()["skip"] == [[2, 4]]
    with pytest.raises(UsageError, match=r"position 10.*\[\(2, 4\)\]"):
        cursor(100, skip=[(2, 4), (8, 14)]).load_state_dict(saved)


def test_skip_while_running() -> None:
    one = committed(2, n=100)
    with pytest.raises(UsageError, match="position 8"):
        one.skip(7, 9)
    one.skip(8, 12)
    one.commit()
    assert one.state_dict()["position"] == 16
    next(one.own_microbatches())
    with pytest.raises(UsageError, match="being iterated"):
        one.skip(20, 24)


def test_coverage_counts_what_was_committed() -> None:
    from samerun.data.coverage import mix64

    expected = sum(mix64(e, s) for e in (0, 1) for s in range(10)) % 2**64
    assert committed(5).state_dict()["coverage"] == f"{expected:016x}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "0 samples"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": 2**64}, "64 bits"),
        ({"global_batch": "4"}, "global_batch='4'"),
        ({"micro_batch": True}, "micro_batch=True"),
        ({"epoch_end": "pad"}, r"epoch_end='pad'.*straddle.*drop_tail"),
    ],
)
def test_impossible_arguments_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cursor(**options)


def test_attach_after_iteration_began() -> None:
    one = cursor()
    one.attach(Replica(index=0, count=2))
    next(one.own_microbatches())
    one.attach(Replica(index=0, count=2))
    with pytest.raises(UsageError, match="0 of 2"):
        one.attach(Replica(index=1, count=2))
