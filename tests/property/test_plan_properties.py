"""What must hold for every plan: monotone, ordered, conserved, and units never mixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.units import Size, SizeBase, parse_size
from samerun.errors import UsageError
from samerun.plan import (
    Family,
    Layout,
    MemoryPlan,
    MemoryRequest,
    Mesh,
    Method,
    Microbatch,
    Optimizer,
    Precision,
    Saving,
    Schedule,
    Shape,
    Tier,
    plan_batch,
    plan_memory,
    plan_schedule,
    rate_from_failures,
    simulate,
)
from samerun.plan.availability.interval import (
    daly_seconds,
    exact_ettr,
    exact_seconds,
    optimum_seconds,
    point,
    young_seconds,
)
from samerun.plan.availability.simulation import SimulationRequest
from samerun.plan.batch import BatchRequest, on_ranks
from samerun.plan.memory.activations import activation_terms
from samerun.plan.memory.counts import rank_counts
from samerun.plan.memory.plan import Verdict, judge
from samerun.plan.memory.request import Activations, Attention, Loss, Recompute, Save
from samerun.plan.memory.term import Phase
from samerun.plan.noise import noise_trace, squared_gradient
from samerun.plan.scaling import Hyper, square_root_rule
from samerun.plan.schedule import Decay, Keep, lr_at, position_at_sample, remap

"""Tests share their machine: how long one example takes says nothing."""


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    heads = draw(st.sampled_from([2, 4, 8]))
    head = draw(st.sampled_from([8, 13]))
    return Shape(
        family=draw(st.sampled_from(Family)),
        num_layers=draw(st.integers(1, 13)),
        hidden_size=heads * head,
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([1, 2, heads])),
        head_size=head,
        ffn_size=draw(st.sampled_from([16, 64, 112])),
        vocab_size=draw(st.integers(7, 997)),
        is_tied=draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn) -> MemoryRequest:
    tensor, pipeline = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 3]))
    shape = draw(shapes())
    pipeline = min(pipeline, shape.num_layers)
    mesh = Mesh(num_ranks=tensor * pipeline * draw(st.integers(1, 4)), num_tensor=tensor, num_pipeline=pipeline)
    return MemoryRequest(
        shape=shape,
        method=draw(st.sampled_from(Method)),
        precision=draw(st.sampled_from([Precision.FP32, Precision.BF16, Precision.BF16_PURE])),
        optimizer=draw(st.sampled_from(Optimizer)),
        layout=Layout(
            mesh=mesh,
            zero_stage=draw(st.integers(0, 3)),
            is_sequence_parallel=tensor > 1 and draw(st.booleans()),
            is_unsharded_accumulation=draw(st.booleans()),
        ),
        batch=Microbatch(
            num_sequences=draw(st.integers(1, 5)),
            sequence_length=draw(st.integers(1, 700)),
            num_accumulated=draw(st.integers(1, 4)),
        ),
        activations=Activations(
            attention=draw(st.sampled_from(Attention)),
            recompute=draw(st.sampled_from(Recompute)),
            segment_layers=draw(st.integers(1, 15)),
            loss=draw(st.sampled_from(Loss)),
        ),
        save=draw(st.sampled_from(Save)),
    )


def ordered(less: MemoryPlan, more: MemoryPlan) -> bool:
    assert less.upper_bytes is not None
    assert more.upper_bytes is not None
    return less.lower_bytes <= more.lower_bytes and less.upper_bytes <= more.upper_bytes


@given(requests())
def test_bounds_are_ordered_and_the_peak_is_a_phase(request_: MemoryRequest) -> None:
    plan = plan_memory(request_)
    assert plan.upper_bytes is not None
    assert 0 < plan.lower_bytes <= plan.upper_bytes
    for term in (*plan.terms, *plan.host_terms):
        assert term.upper_bytes is not None
        assert 0 <= term.lower_bytes <= term.upper_bytes
        assert term.formula
        assert term.source
    assert plan.lower_bytes >= max(sum(term.lower_in(phase) for term in plan.terms) for phase in Phase)
    sums = [sum(term.upper_in(phase) or 0 for term in plan.terms) for phase in Phase]
    assert plan.upper_bytes >= max(sums)
    assert plan.upper_bytes <= sum(term.upper_bytes or 0 for term in plan.terms) or plan.stage != "only"


@given(requests(), st.integers(1, 3))
def test_more_work_never_needs_less(request_: MemoryRequest, more: int) -> None:
    plan, batch = plan_memory(request_), request_.batch
    longer = replace(request_, batch=replace(batch, sequence_length=batch.sequence_length + more))
    wider = replace(request_, batch=replace(batch, num_sequences=batch.num_sequences + more))
    accumulating = replace(request_, batch=replace(batch, num_accumulated=batch.num_accumulated + more))
    for bigger in (longer, wider, accumulating):
        assert ordered(plan, plan_memory(bigger))


@given(requests(), st.integers(2, 5))
def test_sharding_over_more_replicas_never_needs_more(request_: MemoryRequest, factor: int) -> None:
    """At stage 3 or with one replica already sharded: the state shrinks and nothing appears that was not there."""
    layout = request_.layout
    if layout.num_shards == 1 or layout.zero_stage == 0:
        return
    mesh = replace(layout.mesh, num_ranks=layout.mesh.num_ranks * factor)
    wider = plan_memory(replace(request_, layout=replace(layout, mesh=mesh)))
    assert ordered(wider, plan_memory(request_))


@given(requests())
def test_recomputing_never_saves_more_activations(request_: MemoryRequest) -> None:
    """What the first stage keeps: inputs of blocks ≤ everything, attention recomputed ≤ everything."""

    def kept(mode: Recompute) -> int:
        asked = replace(request_, activations=replace(request_.activations, recompute=mode))
        counts = rank_counts(asked, is_last_stage=False)
        return activation_terms(asked, counts, is_last_stage=False)[0].upper_bytes or 0

    assert kept(Recompute.FULL) <= kept(Recompute.NONE)
    assert kept(Recompute.SELECTIVE) <= kept(Recompute.NONE)
    assert kept(Recompute.SQRT) <= kept(Recompute.FULL)


@given(st.integers(0, 2**45), st.integers(0, 2**45) | st.none(), st.integers(1, 2**45))
def test_verdicts(lower: int, extra: int | None, device: int) -> None:
    """Fits only when the upper bound fits; does not fit only when the lower one does not; never both."""
    upper = None if extra is None else lower + extra
    verdict = judge(lower, upper, device)
    assert (verdict is Verdict.DOES_NOT_FIT) == (lower > device)
    assert (verdict is Verdict.FITS) == (upper is not None and upper <= device)


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_sizes_of_different_bases_cannot_be_added(first: int, second: int) -> None:
    binary, decimal = Size(first, SizeBase.BINARY), Size(second, SizeBase.DECIMAL)
    for mixed in (lambda: binary + decimal, lambda: decimal - binary, lambda: binary < decimal):
        with pytest.raises(TypeError, match="different bases"):
            mixed()
    assert (binary + decimal.to(SizeBase.BINARY)).num_bytes == first + second
    assert parse_size("1GiB").num_bytes - parse_size("1GB").num_bytes == 2**30 - 10**9


durations = st.floats(0.01, 1e6)


@given(durations, durations)
def test_optima_agree_where_saves_are_short(cost: float, mtbf: float) -> None:
    """Young, Daly and the exact optimum: within 1 % once c/M is small; Daly within 1 % of exact below M/2."""
    if cost < mtbf / 2:
        assert daly_seconds(cost, mtbf) == pytest.approx(exact_seconds(cost, mtbf), rel=0.01)
    if cost < 1e-4 * mtbf:
        assert young_seconds(cost, mtbf) == pytest.approx(exact_seconds(cost, mtbf), rel=0.01)
    assert 0 < exact_seconds(cost, mtbf) <= mtbf


@given(durations, durations, st.floats(1.01, 10))
def test_longer_saves_and_rarer_failures_mean_rarer_saves(cost: float, mtbf: float, factor: float) -> None:
    assert exact_seconds(cost, mtbf) <= exact_seconds(cost * factor, mtbf) * (1 + 1e-9)
    assert exact_seconds(cost, mtbf) <= exact_seconds(cost, mtbf * factor) * (1 + 1e-9)


@given(durations, durations, durations, st.floats(0, 1), st.floats(0.1, 10))
def test_a_kept_share_is_a_share_and_falls_with_the_failure_rate(
    blocked: float, mtbf: float, lag: float, slowdown: float, factor: float
) -> None:
    saving = Saving(blocked_seconds=blocked, lag_seconds=lag, slowdown=slowdown, restart_seconds=10)
    interval = optimum_seconds(saving, mtbf) * factor
    found = point(interval, saving, mtbf)
    assert 0 <= found.ettr <= 1
    assert 0 < found.overhead < 1
    assert exact_ettr(interval, saving, mtbf) <= exact_ettr(interval, saving, mtbf * 1.5) * (1 + 1e-12)


@given(st.integers(1, 500), st.floats(1, 1e9))
def test_the_interval_of_a_rate_holds_its_point(failures: int, span: float) -> None:
    rate = rate_from_failures(failures, span)
    assert rate.lower_seconds is not None
    assert rate.upper_seconds is not None
    assert rate.lower_seconds < rate.mtbf_seconds < rate.upper_seconds


tiers = st.builds(
    Tier, interval_seconds=st.floats(1, 1e4), lag_seconds=st.floats(0, 1e4), restart_seconds=st.floats(0, 1e4)
)


@settings(max_examples=60)
@given(
    tiers, st.floats(1, 1e5), st.floats(0, 100), st.floats(0, 1), st.integers(1, 12), st.floats(0, 1), st.floats(0.5, 2)
)
def test_time_is_conserved(  # one argument for each random quantity
    durable: Tier, mtbf: float, blocked: float, slowdown: float, per: int, share: float, shape: float
) -> None:
    """Every second is kept, redone, blocked, slowed or restarting, to 1e-9; nothing is negative; ETTR is a share."""
    near = Tier(interval_seconds=durable.interval_seconds / per, lag_seconds=durable.lag_seconds / 20)
    found = simulate(
        SimulationRequest(
            mtbf_seconds=mtbf, durable=durable, blocked_seconds=blocked, slowdown=slowdown, near=near, near_share=share,
            weibull_shape=shape, num_failures=150,
        )
    )  # fmt: skip
    assert found.imbalance < 1e-9
    assert 0 <= found.ettr <= 1
    slack = -1e-9 * found.wall_seconds
    assert found.kept_seconds >= 0
    for part in (found.redone_seconds, found.blocked_seconds, found.slowed_seconds, found.restart_seconds):
        assert part >= slack


@settings(max_examples=25)
@given(st.floats(1, 60), st.floats(0.05, 2), st.floats(0, 30), st.floats(0, 0.3), st.integers(0, 1000))
def test_simulation_and_exact_formula_agree(
    every: float, blocked: float, lag: float, slowdown: float, seed: int
) -> None:
    saving = Saving(blocked_seconds=blocked, lag_seconds=lag, slowdown=slowdown, restart_seconds=5)
    durable = Tier(interval_seconds=every, lag_seconds=lag, restart_seconds=5)
    found = simulate(
        SimulationRequest(
            mtbf_seconds=300, durable=durable, blocked_seconds=blocked, slowdown=slowdown, num_failures=4000, seed=seed
        )
    )
    # 6 standard errors: 25 examples × many runs of the suite, and the error itself comes from 20 batches
    assert found.ettr == pytest.approx(exact_ettr(every, saving, 300), abs=6 * found.standard_error)


@given(st.integers(1, 13), st.integers(1, 13), st.integers(1, 13))
def test_batches_solve_back(micro: int, accumulated: int, replicas: int) -> None:
    known = {"micro_batch": micro, "num_accumulated": accumulated, "num_replicas": replicas}
    plan = plan_batch(BatchRequest(**known))
    for missing in known:
        rest = {name: value for name, value in known.items() if name != missing}
        again = plan_batch(BatchRequest(global_batch=plan.global_batch, **rest))
        assert replace(again, solved="global_batch") == plan


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 13), st.integers(1, 13))
def test_ranks_may_go_but_no_microbatch_is_lost(microbatches: int, micro: int, before: int, after: int) -> None:
    total = micro * microbatches
    if microbatches < before:
        with pytest.raises(UsageError, match="nothing to do"):
            plan_batch(BatchRequest(global_batch=total, micro_batch=micro, num_replicas=before))
        return
    plan = plan_batch(BatchRequest(global_batch=total, micro_batch=micro, num_replicas=before))
    if microbatches < after:
        return
    moved, idle = on_ranks(plan, after)
    assert idle == 0
    assert moved.global_batch == total
    full = moved.num_replicas - moved.num_replicas_with_fewer
    counted = full * moved.num_accumulated + moved.num_replicas_with_fewer * (moved.num_accumulated - 1)
    assert counted == microbatches
    assert 0 <= moved.num_replicas_with_fewer < moved.num_replicas


@given(st.integers(0, 50), st.integers(1, 500), st.sampled_from(Decay), st.floats(0, 1), st.floats(0, 1))
def test_learning_rates_stay_between_zero_and_the_peak(
    warmup: int, decay_steps: int, decay: Decay, final: float, place: float
) -> None:
    schedule = Schedule(peak_lr=0.3, warmup=warmup, total=warmup + decay_steps, decay=decay, final_fraction=final)
    assert 0 <= lr_at(schedule, place * schedule.total * 1.2) <= 0.3 * (1 + 1e-12)
    assert lr_at(schedule, warmup) == pytest.approx(0.3)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 199), st.floats(0, 1))
def test_keeping_data_keeps_the_rate_at_every_sample(old: int, new: int, done: int, place: float) -> None:
    plan = plan_schedule(Schedule(peak_lr=1.0, warmup=20, total=200), old)
    moved = remap(plan, new, done_updates=done, keep=Keep.DATA)
    assert moved.remap is not None
    sample = place * plan.total.samples
    before, after = position_at_sample(moved, sample)
    assert after is not None
    assert lr_at(moved.remap.schedule, after) == pytest.approx(lr_at(plan.schedule, before), abs=1e-9)
    left = plan.total.samples - done * old
    assert (moved.remap.remaining_updates - 1) * new < left <= moved.remap.remaining_updates * new


@given(st.floats(1e-6, 1), st.floats(0.5, 0.9999), st.floats(0.5, 0.9999), st.floats(1.01, 100))
def test_the_square_root_rule_gives_coefficients_or_refuses(
    lr: float, beta1: float, beta2: float, factor: float
) -> None:
    before = Hyper(lr=lr, beta1=beta1, beta2=beta2, eps=1e-8)
    if factor * (1 - min(beta1, beta2)) >= 1 - 1e-9:
        with pytest.raises(UsageError):
            square_root_rule(before, factor * (1 + 1e-6))
        return
    after = square_root_rule(before, factor)
    back = square_root_rule(after, 1 / factor)
    assert (back.lr, back.beta1, back.beta2, back.eps) == pytest.approx((lr, beta1, beta2, 1e-8), rel=1e-9)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 100), st.integers(1, 100))
def test_the_noise_estimator_gives_back_what_made_it(gradient: float, trace: float, small: int, more: int) -> None:
    """Exact at expected norms: E|g_B|² = |G|² + tr Σ / B."""
    big = small + more
    norms = gradient + trace / small, gradient + trace / big
    scale = gradient + trace
    assert squared_gradient(*norms, small, big) == pytest.approx(gradient, abs=1e-9 * scale * big)
    assert noise_trace(*norms, small, big) == pytest.approx(trace, abs=1e-9 * scale * big * big)
