import itertools
import json

import pytest

from samerun.data import Data
from samerun.data.ledger import audit, began_line, ledger_line
from samerun.data.order import Order
from samerun.data.windows import Windowing

WINDOWING = Windowing(order=Order(num_samples=13, seed=7), global_batch=5, micro_batch=2)


def written(num_windows: int) -> list[dict]:
    lines = []
    with Data(range(13), global_batch=5, micro_batch=2, seed=7) as data:
        for window in itertools.islice(data.windows(), num_windows):
            coverage = sum(batch.coverage for batch in window) % 2**64
            lines.append(ledger_line(window, decision="updated", replicas=1, coverage=coverage))
            data.commit(window)
    return json.loads(json.dumps(lines))  # type: ignore[no-any-return]


def test_a_true_ledger_has_no_problems() -> None:
    lines = written(8)
    assert audit(lines, WINDOWING) == [] and audit([]) == []
    assert audit([*lines[:5], *lines[3:]], WINDOWING) == [], "windows decided again after a crash"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda lines: lines[:3] + lines[4:], "window 4 follows window 2"),
        (lambda lines: lines[1:], "window 1 follows window -1"),
        (
            lambda lines: [line | {"start": line["start"] + (line["window"] > 2)} for line in lines],
            "begins at position 16",
        ),
        (lambda lines: [lines[0] | {"coverage": lines[1]["coverage"]}, *lines[1:]], "window 0 delivered"),
        (lambda lines: [lines[0] | {"end": 6}, *lines[1:]], "window 1 begins at position 5"),
    ],
)
def test_every_fault_is_named(fault, words: str) -> None:  # type: ignore[no-untyped-def]
    assert any(words in problem for problem in audit(fault(written(6)), WINDOWING))


def test_a_window_decided_twice_in_one_attempt_is_named() -> None:
    lines = written(6)
    with Data(range(13), global_batch=5, micro_batch=2, seed=7) as data:
        began = [
            began_line(attempt=number, window=window, source=data.state_dict()) for number, window in ((1, 0), (2, 3))
        ]
    assert audit([began[0], *lines[:5], began[1], *lines[3:]]) == []
    assert audit([began[0], *lines[:3], lines[2], *lines[3:]]) == ["window 2 was decided twice in attempt 1"]
    assert (
        audit([began[0], *lines[:5], began[1], *lines[3:5], lines[3]])[0] == "window 3 was decided twice in attempt 2"
    )
