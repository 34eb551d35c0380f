import random

import pytest

from samerun.data.fetch import python_state
from samerun.data.fetch.python_state import PythonState


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), random.randrange(1000), random.gauss(0, 1), random.random()]


@pytest.fixture(params=["fast", "slow"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "slow":
        monkeypatch.setattr(python_state, "_layout_is_known", lambda: False)
    else:
        assert python_state._layout_is_known(), "this interpreter lays its state out in another way"
    return request.param  # type: ignore[no-any-return]


def nothing() -> None:
    pass


@pytest.mark.parametrize("normals", range(4), ids="halves {}".format)
@pytest.mark.parametrize("words", [0, 1, 623, 624, 625])
@pytest.mark.parametrize("meanwhile", [nothing, draws, lambda: random.seed(3), lambda: random.gauss(0, 1)])
def test_whatever_happens_meanwhile_is_forgotten(normals: int, words: int, meanwhile) -> None:  # type: ignore[no-untyped-def]
    """An odd number of normal draws leaves half of a pair waiting: it is part of the state."""

    def start() -> None:
        random.seed(11)
        for _ in range(words):
            random.getrandbits(32)
        for _ in range(normals):
            random.gauss(0, 1)

    start()
    expected = draws()
    start()
    state = PythonState()
    meanwhile()
    state.put_back()
    assert draws() == expected


def test_looking_at_the_layout_changes_nothing() -> None:
    random.seed(5)
    random.gauss(0, 1)
    before = random.getstate()
    vars(python_state)["_check_layout"]()
    assert random.getstate() == before
