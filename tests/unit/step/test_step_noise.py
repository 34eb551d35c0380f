"""The gradient noise scale against a model whose noise is known: |G|² = 0.25, tr Σ = 20, so B = 80."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from rank_pool import RankPool
from samerun.errors import UsageError
from samerun.plan.noise import noise_trace, squared_gradient
from samerun.step import Step
from samerun.step.noise import NoiseEstimate
from step_jobs import batches, flat, loss_sum, net
from step_noise_model import estimate_of, measured, together


@functools.cache
def long_measurement() -> NoiseEstimate:
    return measured(num_windows=400, sizes=[4] * 16)


def test_the_synthetic_values() -> None:
    """5.25 at batch 4 and 0.5625 at batch 64 are 0.25, 20 and B = 80."""
    gradient = squared_gradient(5.25, 0.5625, 4, 64)
    trace = noise_trace(5.25, 0.5625, 4, 64)
    assert (gradient, trace, trace / gradient) == pytest.approx((0.25, 20.0, 80.0), rel=1e-12)


def test_the_loop_finds_a_known_noise_scale() -> None:
    """400 windows of 16 microbatches of 4: the expected norms are those of the synthetic check."""
    found = long_measurement()
    assert found.num_windows == 400
    assert found.is_identifiable and found.noise_scale is not None
    assert found.lower is not None and found.upper is not None
    assert found.lower < 80.0 < found.upper
    assert found.noise_scale == pytest.approx(80.0, rel=0.15)  # four standard errors of this many windows
    assert found.noise_trace == pytest.approx(20.0, rel=0.05)


def test_unequal_microbatches_use_their_harmonic_mean() -> None:
    found = measured(num_windows=400, sizes=[1, 7, 13, 1, 30, 12])
    assert found.lower is not None and found.upper is not None
    assert found.lower < 80.0 < found.upper
    assert found.noise_trace == pytest.approx(20.0, rel=0.05)


def test_the_arithmetic_mean_would_be_wrong() -> None:
    """The control: with n taken as the plain mean of sizes the trace is far from 20."""
    sizes = [1, 7, 13, 1, 30, 12]
    small = 0.25 + 20.0 * sum(1 / n for n in sizes) / len(sizes)
    big = 0.25 + 20.0 / sum(sizes)
    assert noise_trace(small, big, sum(sizes) / len(sizes), sum(sizes)) > 60.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_leaves_out_the_reduced_microbatch(ranks: RankPool, world_size: int) -> None:
    answers = ranks.run(world_size, "step_noise_model:on_ranks", num_windows=60, sizes=[4] * (4 * world_size))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["num_windows"] == 60
    assert answers[0]["noise_trace"] == pytest.approx(20.0, rel=0.1)


def test_the_loss_scale_does_not_enter() -> None:
    plain = measured(num_windows=20, sizes=[4, 4, 4])
    scaled = measured(num_windows=20, sizes=[4, 4, 4], precision="fp16")
    assert scaled.noise_trace == pytest.approx(plain.noise_trace, rel=1e-4)  # float32 sums at another scale
    assert scaled.squared_gradient == pytest.approx(plain.squared_gradient, rel=1e-3)


def test_only_every_nth_window_is_measured_and_skipped_ones_are_dropped() -> None:
    assert measured(num_windows=20, sizes=[4, 4], every=5).num_windows == 4
    assert measured(num_windows=20, sizes=[4, 4], every=5, bad=(0, 1)).num_windows == 3


def test_measuring_changes_no_bit() -> None:
    results = []
    for every in (None, 1):
        model = net(dtype=torch.float32)
        step = Step(model, torch.optim.AdamW(model.parameters(), lr=0.1), max_norm=0.5, noise_every=every)
        for _ in range(5):
            window = step.window(batches([4, 2, 7], torch.float32))
            for batch in window:
                window.backward(loss_sum(model, batch), len(batch[1]))
            window.step()
        results.append(flat(model))
    assert results[0] == results[1]


def test_clipping_does_not_enter() -> None:
    plain, clipped = measured(num_windows=10, sizes=[4, 4]), measured(num_windows=10, sizes=[4, 4], max_norm=0.01)
    assert plain == clipped


def test_too_little_to_tell() -> None:
    assert not measured(num_windows=1, sizes=[4, 4]).is_identifiable
    assert "not identifiable" in str(measured(num_windows=1, sizes=[4, 4]))
    pure_noise = measured(num_windows=100, sizes=[4] * 4, gradient=0.0)
    assert not pure_noise.is_identifiable
    nothing = measured(num_windows=10, sizes=[4])  # one microbatch: nothing to compare
    assert nothing.num_windows == 0
    assert math.isnan(nothing.noise_trace)
    assert "not identifiable from 0 windows" in str(nothing)


def test_the_sentence() -> None:
    said = str(long_measurement())
    assert said.startswith("noise scale ") and "(95 %: " in said and "400 windows" in said


def test_goes_on_after_a_resume() -> None:
    twin = estimate_of(num_windows=30, cut=None)
    for cut in (1, 7, 29):
        assert estimate_of(num_windows=30, cut=cut) == twin


def test_refused_where_it_cannot_see(ranks: RankPool) -> None:
    model = net()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="noise_every"):
        step.noise()
    with pytest.raises(UsageError, match="at least 1"):
        Step(model, torch.optim.SGD(model.parameters(), lr=0.1), noise_every=0)
    half = net(dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="full precision"):
        Step(half, torch.optim.SGD(half.parameters(), lr=0.1), noise_every=1)
    for answer in ranks.answers(2, "step_noise_model:under_fsdp", num_windows=1, sizes=[4] * 4, accumulate="unsharded"):
        assert answer["error"] == "UsageError" and "accumulate='sharded'" in answer["text"]


@pytest.mark.parametrize(("world_size", "sizes"), [(2, [4] * 6), (2, [4, 2, 1, 7, 3]), (3, [4] * 7)])
def test_shards_see_what_their_replicas_do_together(ranks: RankPool, world_size: int, sizes: list[int]) -> None:
    """Also where D does not divide the microbatches, so that a rank's last forward is filler."""
    answers = ranks.run(world_size, "step_noise_model:under_fsdp", num_windows=12, sizes=sizes)
    expected = together(num_windows=12, sizes=sizes, num_replicas=world_size)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == pytest.approx(expected, rel=1e-3)  # float32 sums in another order, then differences of norms
