"""Random streams: put back exactly, left alone by what must not draw, derived alike where they cannot be put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.errors import MismatchError
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.state.rng import Rng, capture_rng, preserved_rng, restore_rng, seed_all, seed_at
from samerun.storage.memory import Memory


def draws() -> list[Any]:
    """From each stream, in the ways that keep something between calls."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


@pytest.fixture(autouse=True)
def _streams_stay_as_they_were() -> Any:
    with preserved_rng():
        yield


def test_restored_streams_give_the_same_draws() -> None:
    seed_all(5)
    draws()
    state = capture_rng()
    expected = [draws() for _ in range(3)]
    seed_all(6)
    restore_rng(state)
    assert [draws() for _ in range(3)] == expected


@pytest.mark.parametrize("stream", ["python", "numpy", "torch"])
def test_control_each_stream_matters(stream: str) -> None:
    seed_all(5)
    state = capture_rng()
    expected = draws()
    seed_all(6)
    other = capture_rng()
    restore_rng({**state, stream: other[stream]})
    assert draws() != expected


def test_capturing_draws_nothing() -> None:
    seed_all(5)
    expected = draws()
    seed_all(5)
    capture_rng()
    assert draws() == expected


def test_preserved_streams_ignore_what_the_body_drew() -> None:
    seed_all(5)
    expected = draws()
    seed_all(5)
    with pytest.raises(RuntimeError), preserved_rng():
        draws()
        raise RuntimeError
    assert draws() == expected


def test_streams_pass_through_a_store_exactly() -> None:
    seed_all(5)
    random.gauss(0, 1)  # leaves a cached second value behind
    np.random.standard_normal()
    store = Store(Memory())
    store.save({"rng": Rng().capture()}, Progress(), facts={}).result()
    expected = draws()
    with store.open(store.catalog().entries[0]) as checkpoint:
        Rng().restore(checkpoint.source("rng"))
    assert draws() == expected


def test_no_rank_gets_anothers_streams() -> None:
    storage = Memory()
    lock_step: dict[int, Any] = {}
    for rank in range(3):  # threads share the global streams, so each rank's are made before
        seed_all(100 + rank)
        lock_step[rank] = capture_rng()

    def save(group: ThreadGroup) -> None:
        Store(storage, group=group).save({"rng": Captured(plain=lock_step[group.rank])}, Progress(), facts={}).result()

    def load(group: ThreadGroup) -> Any:
        store = Store(storage, group=group)
        with store.open(store.catalog().entries[0]) as checkpoint:
            return checkpoint.source("rng").plain

    run_ranks(3, save)
    assert run_ranks(3, load) == [lock_step[rank] for rank in range(3)]


def test_derived_streams_are_a_function_of_run_window_and_rank() -> None:
    def derived(run_id: str, windows: int, rank: int) -> list[Any]:
        rng = Rng()
        rng.derive(run_id=run_id, windows=windows, rank=rank)
        assert rng.derived
        return draws()

    base = derived("run", 7, 1)
    seed_all(99)
    assert derived("run", 7, 1) == base
    assert base not in (derived("run", 7, 2), derived("run", 8, 1), derived("other", 7, 1))


def test_a_checkpoint_without_streams_is_refused() -> None:
    class Empty:
        plain = None

    with pytest.raises(MismatchError, match="rng: the checkpoint's entry is not a table of streams"):
        Rng().restore(Empty())  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
def test_a_cuda_stream_without_a_device_is_refused() -> None:
    with pytest.raises(MismatchError, match="holds a CUDA stream and this process has no CUDA device"):
        restore_rng({**capture_rng(), "cuda": b"\x00" * 16})


def test_every_microbatch_of_every_window_and_every_rank_of_a_new_topology_draws_its_own() -> None:
    drawn = set()
    with preserved_rng():
        for window in range(6):
            for microbatch in range(6):
                seed_at(3, window, microbatch)
                drawn.add((random.random(), float(np.random.rand()), float(torch.rand(()))))
        for windows in range(6):
            for rank in range(6):
                Rng().derive(run_id="a", windows=windows, rank=rank)
                drawn.add((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert len(drawn) == 72
