import numpy as np
import pytest

from samerun.data.coverage import MASK, add_coverage, coverage_of, coverage_of_pairs, mix, mix64, mix_array


def test_mix_is_the_published_splitmix64() -> None:
    """First outputs of SplitMix64 from state 1234567, as published with the Java and Rosetta reference programs."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_arrays_agree_with_integers() -> None:
    values = [0, 1, 2**63, MASK, 12345]
    assert mix_array(np.array(values, np.uint64)).tolist() == [mix(v) for v in values]
    epochs, samples = np.array([0, 0, 1, 7]), np.array([0, 5, 5, 10**12])
    expected = sum(mix64(int(e), int(s)) for e, s in zip(epochs, samples, strict=True)) & MASK
    assert coverage_of(epochs, samples) == expected
    for count in (0, 1, 16, 17, 40):
        pairs = [(i % 3, 7 * i) for i in range(count)]
        assert coverage_of_pairs(pairs) == sum(mix64(e, s) for e, s in pairs) & MASK


def test_parts_add_up_in_any_order() -> None:
    epochs, samples = np.repeat([0, 1], 50), np.tile(np.arange(50), 2)
    whole = coverage_of(epochs, samples)
    mixed = np.random.default_rng(0).permutation(100)
    first, second = mixed[:37], mixed[37:]
    assert (
        add_coverage(coverage_of(epochs[first], samples[first]), coverage_of(epochs[second], samples[second])) == whole
    )
    assert coverage_of(epochs[:0], samples[:0]) == 0


@pytest.mark.parametrize("change", ["missing", "repeated", "swapped", "other epoch", "shifted pair"])
def test_every_fault_changes_the_sum(change: str) -> None:
    pairs = [(0, s) for s in range(20)]
    faulty = {
        "missing": pairs[:-1],
        "repeated": [*pairs[:-1], pairs[0]],
        "swapped": [*pairs[:-1], (0, 20)],
        "other epoch": [*pairs[:-1], (1, 19)],
        "shifted pair": [*pairs[2:], (1, 0), (0, 0)],
    }[change]
    right, wrong = (coverage_of(*np.array(p).T) for p in (pairs, faulty))
    assert right != wrong
