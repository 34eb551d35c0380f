import numpy as np
import pytest

from samerun.data.fetch import numpy_state
from samerun.data.fetch.numpy_state import NumpyState


def draws() -> list[float]:
    return [np.random.rand(), np.random.randn(), np.random.randint(1000), np.random.randn(), np.random.rand()]


@pytest.fixture(params=["fast", "slow"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "slow":
        monkeypatch.setattr(numpy_state, "_layout_is_known", lambda: False)
    else:
        assert numpy_state._layout_is_known(), "this NumPy lays its state out in another way"
    return request.param  # type: ignore[no-any-return]


def nothing() -> None:
    pass


@pytest.mark.parametrize("normals", range(4), ids="halves {}".format)
@pytest.mark.parametrize("words", [0, 1, 623, 624, 625])
@pytest.mark.parametrize("meanwhile", [nothing, draws, lambda: np.random.seed(3), lambda: np.random.randn(7)])
def test_whatever_happens_meanwhile_is_forgotten(normals: int, words: int, meanwhile) -> None:  # type: ignore[no-untyped-def]
    """An odd number of normal draws leaves half of a pair waiting: it is part of the state."""

    def start() -> None:
        np.random.seed(11)
        np.random.bytes(4 * words)
        np.random.randn(normals)

    start()
    expected = draws()
    start()
    state = NumpyState()
    meanwhile()
    state.put_back()
    assert draws() == expected


def test_an_exchanged_generator_is_put_back() -> None:
    np.random.seed(5)
    expected = draws()
    np.random.seed(5)
    before = np.random.get_bit_generator()
    state = NumpyState()
    np.random.set_bit_generator(np.random.PCG64(1))
    np.random.rand()
    state.put_back()
    assert np.random.get_bit_generator() is before and draws() == expected


def test_another_kind_of_generator_is_kept_too() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        expected = np.random.PCG64(1)
        state = NumpyState()
        np.random.rand(5)
        state.put_back()
        assert np.random.get_bit_generator().state == expected.state
    finally:
        np.random.set_bit_generator(before)
