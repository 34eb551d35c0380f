"""Batches, schedules, scaling rules, noise, cost, deadlines and recipes against published or derived figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samerun.cli.plan.hypotheses import read_measurements
from samerun.errors import UsageError
from samerun.plan import Clock, Lengths, Mesh, Recipe, Schedule, plan_batch, plan_noise, plan_recipe, plan_schedule
from samerun.plan.availability.deadline import Link, Outcome, link, plan_preempt
from samerun.plan.availability.deadline import Path as Steps
from samerun.plan.batch import BatchRequest, measure_lengths, on_ranks
from samerun.plan.cost import CostRequest, Recomputing, full_recompute_factor, plan_cost, recompute_factor, update_flops
from samerun.plan.mesh import refuse_overlapping
from samerun.plan.noise import Measured, harmonic_batch, noise_trace, squared_gradient, steps_and_samples
from samerun.plan.recipe import Base, Compute, Device, Distillation, Objective, RecipeVerdict, Teacher, Trainable
from samerun.plan.scaling import Hyper, largest_factor, linear_rule, plan_scaling, square_root_rule
from samerun.plan.schedule import Decay, Keep, lr_at, position_at_sample, remap


def test_eight_gpus_tp_2_are_four_replicas() -> None:
    assert Mesh(num_ranks=8, num_tensor=2).num_replicas == 4


def test_context_ranks_are_no_replicas() -> None:
    assert Mesh(num_ranks=16, num_tensor=2, num_context=4).num_replicas == 2


@pytest.mark.parametrize("missing", ["global_batch", "micro_batch", "num_accumulated", "num_replicas"])
def test_solved_for_any_one_unknown(missing: str) -> None:
    """policy-sft-v4: 2 sequences × 8 microbatches × 4 replicas = 64."""
    known = {"global_batch": 64, "micro_batch": 2, "num_accumulated": 8, "num_replicas": 4}
    plan = plan_batch(BatchRequest(**{name: value for name, value in known.items() if name != missing}))
    assert plan.solved == missing
    assert {name: getattr(plan, name) for name in known} == known


def test_energon_pair() -> None:
    """Energon: B 8, m 2: four replicas with one microbatch are one replica with four."""
    wide = plan_batch(BatchRequest(global_batch=8, micro_batch=2, num_replicas=4))
    long = plan_batch(BatchRequest(global_batch=8, micro_batch=2, num_replicas=1))
    assert (wide.num_accumulated, long.num_accumulated) == (1, 4)


def test_losing_three_of_eight_ranks_keeps_the_batch() -> None:
    """32 microbatches over 5 replicas: two run 7, three run 6."""
    plan, idle = on_ranks(plan_batch(BatchRequest(global_batch=64, micro_batch=2, mesh=Mesh(num_ranks=8))), 5)
    assert (plan.global_batch, plan.num_replicas, plan.num_accumulated, plan.num_replicas_with_fewer, idle) == (
        64,
        5,
        7,
        3,
        0,
    )


def test_losing_ranks_of_a_mesh_leaves_some_idle() -> None:
    before = plan_batch(BatchRequest(global_batch=64, micro_batch=2, mesh=Mesh(num_ranks=8, num_tensor=2)))
    after, idle = on_ranks(before, 5)
    assert (after.num_replicas, idle) == (2, 1)
    with pytest.raises(UsageError, match="fewer than the 2 of one replica"):
        on_ranks(before, 1)


def test_tokens_per_update_from_measured_lengths() -> None:
    """Sample mean and deviation; B independent samples spread √B times."""
    lengths = measure_lengths([100, 200, 300])
    assert (lengths.mean_tokens, lengths.deviation_tokens, lengths.num_measured) == (200, 100, 3)
    plan = plan_batch(BatchRequest(global_batch=64, micro_batch=2, num_replicas=4, lengths=lengths))
    assert (plan.tokens_per_update, plan.tokens_deviation) == (12800, 800)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"global_batch": 64, "micro_batch": 3, "num_replicas": 2}, "nearest is --global 63"),
        ({"global_batch": 6, "micro_batch": 2, "num_replicas": 8}, "--global 16"),
        ({"global_batch": 64}, "one equation solves one"),
        (
            {"global_batch": 64, "micro_batch": 2, "num_accumulated": 4, "num_replicas": 4},
            "needs --accumulate 8, not 4",
        ),
        ({"global_batch": 63, "num_accumulated": 2, "num_replicas": 4}, "a global batch of 64 would"),
        ({"global_batch": 0, "micro_batch": 2, "num_replicas": 4}, "write it like --global 8"),
        ({"global_batch": -8, "micro_batch": 2, "num_replicas": 4}, "write it like --global 8"),
    ],
)
def test_impossible_batches(request_: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan_batch(BatchRequest(**request_))
    assert said in str(refused.value)


def test_the_product_is_refused_for_overlapping_groups() -> None:
    for wrong in ({"num_expert": 4}, {"is_hybrid": True}):
        with pytest.raises(UsageError, match="State the number of replicas"):
            refuse_overlapping(**wrong)  # type: ignore[arg-type]
    refuse_overlapping(num_expert=1)


@pytest.mark.parametrize(("batch", "samples"), [(64, 6400), (128, 12800)])
def test_warmup_in_samples(batch: int, samples: int) -> None:
    """100 warm-up updates are 6,400 examples at 64 and 12,800 at 128."""
    plan = plan_schedule(Schedule(peak_lr=1.0, warmup=100, total=2000), batch)
    assert plan.warmup.samples == samples


def test_remap_keeping_data_is_the_same_function_of_the_sample() -> None:
    """Doubling the batch halves the updates that remain, and the rate at every sample stays."""
    plan = remap(plan_schedule(Schedule(peak_lr=1.0, warmup=100, total=2000), 64), 128, done_updates=50, keep=Keep.DATA)
    assert plan.remap is not None
    assert plan.remap.remaining_updates == 975
    assert plan.remap.total.samples == plan.total.samples == 128_000
    for sample in range(0, 128_001, 1600):
        before, after = position_at_sample(plan, sample)
        assert after is not None
        assert lr_at(plan.remap.schedule, after) == pytest.approx(lr_at(plan.schedule, before), rel=1e-12)


def test_remap_keeping_updates_moves_the_data() -> None:
    plan = remap(
        plan_schedule(Schedule(peak_lr=1.0, warmup=100, total=2000), 64), 128, done_updates=0, keep=Keep.UPDATES
    )
    assert plan.remap is not None
    assert plan.remap.warmup.samples == 12_800
    assert plan.remap.total.samples == 256_000
    assert plan.remap.remaining_updates == 2000


def test_remap_without_a_choice_is_refused_on_the_update_clock_only() -> None:
    updates = plan_schedule(Schedule(peak_lr=1.0, warmup=100, total=2000), 64)
    with pytest.raises(UsageError, match="inside the warm-up"):
        remap(updates, 128, done_updates=50)
    with pytest.raises(UsageError, match="after the warm-up"):
        remap(updates, 128, done_updates=500)
    samples = Schedule(clock=Clock.SAMPLES, peak_lr=1.0, warmup=6400, total=128_000)
    moved = remap(plan_schedule(samples, 64), 128, done_updates=50)
    assert moved.remap is not None
    assert moved.remap.keep is Keep.DATA
    assert moved.remap.schedule == samples


def test_remaining_updates_round_up() -> None:
    """(total samples − consumed) / B', rounded up: 1,000 samples less 100, by 7."""
    plan = plan_schedule(Schedule(peak_lr=1.0, warmup=0, total=100), 10)
    moved = remap(plan, 7, done_updates=10, keep=Keep.DATA)
    assert moved.remap is not None
    assert moved.remap.remaining_updates == 129


@pytest.mark.parametrize(("decay", "middle"), [(Decay.CONSTANT, 1.0), (Decay.LINEAR, 0.55), (Decay.COSINE, 0.55)])
def test_learning_rates(decay: Decay, middle: float) -> None:
    """Half of the warm-up, the peak, half of the decay to a tenth, the end, and beyond it."""
    schedule = Schedule(peak_lr=1.0, warmup=10, total=110, decay=decay, final_fraction=0.1)
    last = 1.0 if decay is Decay.CONSTANT else 0.1
    found = [lr_at(schedule, position) for position in (0, 5, 10, 60, 110, 500)]
    assert found == pytest.approx([0, 0.5, 1, middle, last, last])


def test_tokens_need_a_length() -> None:
    schedule = Schedule(clock=Clock.TOKENS, peak_lr=1.0, warmup=1e6, total=2e9)
    with pytest.raises(UsageError, match="--seq 4096"):
        plan_schedule(schedule, 64)
    assert plan_schedule(schedule, 64, tokens_per_sample=4096).total.updates == pytest.approx(2e9 / 4096 / 64)
    with pytest.raises(UsageError, match="longer than the total"):
        Schedule(peak_lr=1.0, warmup=300, total=200)


def test_goyal_linear_rule() -> None:
    """arXiv 1706.02677: 0.1 at 256 becomes 3.2 at 8,192."""
    assert linear_rule(Hyper(lr=0.1), 8192 / 256).lr == pytest.approx(3.2)


def test_malladi_square_root_rule() -> None:
    """arXiv 2205.10287, κ = 4: lr 3e-4 → 6e-4, β 0.9 → 0.6, 0.999 → 0.996, 0.95 → 0.8, ε 1e-8 → 5e-9."""
    found = square_root_rule(Hyper(lr=3e-4, beta1=0.9, beta2=0.999, eps=1e-8), 4)
    assert (found.lr, found.beta1, found.beta2, found.eps) == pytest.approx((6e-4, 0.6, 0.996, 5e-9))
    assert square_root_rule(Hyper(lr=1, beta1=0.95, beta2=0.95, eps=1), 4).beta2 == pytest.approx(0.8)


@pytest.mark.parametrize(("beta1", "limit"), [(0.9, 10), (0.95, 20)])
def test_square_root_validity(beta1: float, limit: float) -> None:
    """k(1 − β) < 1: β₁ = 0.9 allows κ < 10, 0.95 allows κ < 20; outside, that arm alone is refused."""
    before = Hyper(lr=1, beta1=beta1, beta2=0.999, eps=1e-8)
    assert largest_factor(beta1, 0.999) == pytest.approx(limit)
    square_root_rule(before, limit * 0.99)
    with pytest.raises(UsageError, match="outside the square-root rule"):
        square_root_rule(before, limit)
    plan = plan_scaling(before, 1, int(limit))
    arms = {candidate.name: candidate.hyper for candidate in plan.candidates}
    assert arms["square-root"] is None
    assert arms["fixed"] == before


def test_the_comparison_has_a_fixed_baseline_at_equal_data() -> None:
    plan = plan_scaling(Hyper(lr=0.1), 64, 128, num_samples=6400)
    assert plan.candidates[0].name == "fixed"
    assert (plan.old_updates, plan.new_updates) == (100, 50)
    with pytest.raises(UsageError, match="--betas"):
        square_root_rule(Hyper(lr=0.1), 2)


def test_noise_scale_synthetic() -> None:
    """|G|² = 0.25, tr Σ = 20, batches 4 and 64: E|g|² are 5.25 and 0.5625; the estimator gives them back."""
    small, big = 0.25 + 20 / 4, 0.25 + 20 / 64
    assert (small, big) == (5.25, 0.5625)
    assert squared_gradient(small, big, 4, 64) == pytest.approx(0.25)
    assert noise_trace(small, big, 4, 64) == pytest.approx(20)
    plan = plan_noise([Measured(small_squared_norm=small, big_squared_norm=big)], 4, 64)
    assert plan.noise_scale == pytest.approx(80)
    assert not plan.is_identifiable  # one window has no interval


def test_at_the_noise_scale_both_costs_double() -> None:
    """arXiv 1812.06162: at B = B_n twice the minimum of steps and of examples; (S/S_min − 1)(E/E_min − 1) = 1."""
    assert steps_and_samples(80, 80) == (2, 2)
    for batch in (1, 16, 80, 4096):
        steps, samples = steps_and_samples(batch, 80)
        assert (steps - 1) * (samples - 1) == pytest.approx(1)


def test_noise_scale_with_an_interval(tmp_path: Path) -> None:
    """Gaussian gradients of known G and Σ: the interval holds the true ratio; pure noise is not identifiable."""
    import random

    rng = random.Random(7)

    def window(mean: float) -> dict[str, float]:
        norms = [sum((mean + rng.gauss(0, 1) / batch**0.5) ** 2 for _ in range(20)) for batch in (4, 64)]
        return {"small_squared_norm": norms[0], "big_squared_norm": norms[1]}

    file = tmp_path / "measured.jsonl"
    lines = [{**window(0.111803), "window": number} for number in range(400)]
    skipped = {"small_squared_norm": 1e9, "big_squared_norm": 1e9, "updated": False, "window": 400}
    again = lines[5]
    file.write_text("\n".join(json.dumps(line) for line in [*lines, skipped, again]) + "\n")
    measured = read_measurements(file)
    assert len(measured) == 400
    plan = plan_noise(measured, 4, 64)
    assert plan.is_identifiable
    assert plan.lower is not None
    assert plan.upper is not None
    assert plan.lower < 20 / 0.25 < plan.upper
    noise = [Measured(**window(0.0)) for _ in range(100)]
    assert not plan_noise(noise, 4, 64).is_identifiable


def test_a_gradient_within_its_error_is_not_identifiable() -> None:
    """Blocks of two windows alternate between |G|² of 1.5 and −1.3: mean 0.1, and its error is several times that.

    Leaving one block out never turns the mean negative, so only the t interval can tell.
    """
    squares = [1.5 if number // 2 % 2 == 0 else -1.3 for number in range(40)]
    windows = [Measured(small_squared_norm=10 - square, big_squared_norm=5) for square in squares]
    plan = plan_noise(windows, 1, 2)
    assert plan.squared_gradient == pytest.approx(0.1)
    assert plan.lower is None
    assert not plan.is_identifiable


def test_harmonic_batch() -> None:
    """Unequal tokens: the small batch is the harmonic mean of the replicas' counts."""
    assert harmonic_batch([4800, 9600]) == pytest.approx(6400)
    with pytest.raises(UsageError, match="positive"):
        harmonic_batch([100, 0])


@pytest.mark.parametrize(("small", "big"), [(4, 4), (8, 4)])
def test_noise_needs_two_batches(small: int, big: int) -> None:
    with pytest.raises(UsageError, match="two different batches"):
        plan_noise([Measured(small_squared_norm=1, big_squared_norm=1)], small, big)


def test_6nd() -> None:
    """C = 6ND: 125 million parameters and 2.5 billion tokens are 1.875e18 FLOPs; 20 tokens a parameter."""
    plan = plan_cost(CostRequest(num_params=125_000_000, num_tokens=2_500_000_000, price_per_device_hour=2.0))
    assert plan.model_flops == pytest.approx(1.875e18)
    assert plan.tokens_per_param == 20
    assert plan.seconds == pytest.approx(1.875e18 / (312e12 * 0.4))
    assert plan.price == pytest.approx(plan.seconds / 3600 * 2)


DAYS = [
    (96, 12288, 174.6, 384, 153, 84.7), (96, 12288, 174.6, 768, 149, 43.5), (96, 12288, 174.6, 1536, 141, 23.0),
    (105, 20480, 529.6, 560, 171, 156.1), (105, 20480, 529.6, 1120, 167, 79.9), (105, 20480, 529.6, 2240, 159, 42.0),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "hidden", "billions", "gpus", "tflops", "days"), DAYS)
def test_days_to_300b_tokens(  # the columns of the table
    layers: int, hidden: int, billions: float, gpus: int, tflops: float, days: float
) -> None:
    """arXiv 2104.04473 table 2 (84/43/23 and 156/80/42 days): full recompute: 96BLsh²(1+s/6h+V/16Lh)."""
    del billions
    flops = update_flops(
        num_layers=layers, hidden=hidden, sequence=2048, vocab=51200, num_sequences=1, recomputing=Recomputing.FULL
    )
    seconds = flops * (300e9 / 2048) / (gpus * tflops * 1e12)
    assert seconds / 86400 == pytest.approx(days, abs=0.2)


@pytest.mark.parametrize(
    ("params", "tokens", "gpus", "tflops", "days"), [(174.6e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)]
)
def test_8tp_over_nx(params: float, tokens: float, gpus: int, tflops: float, days: float) -> None:
    """arXiv 2104.04473 eq. 4: 8TP/(nX), that is 6ND × 4/3: GPT-3 in 34 days, a trillion parameters in 84."""
    peak = 312e12
    plan = plan_cost(
        CostRequest(
            num_params=int(params), num_tokens=int(tokens), num_devices=gpus, peak_flops_per_second=peak,
            utilization=tflops * 1e12 / peak, recomputing=Recomputing.FULL,
        )
    )  # fmt: skip
    assert plan.seconds / 86400 == pytest.approx(days, abs=0.6)


MFU = [
    (64, 6144, 48, 4, 1.10, 8, 41.7, 43.8), (96, 12288, 96, 64, 13.75, 64, 51.4, 52.8),
    (128, 20480, 105, 280, 37.83, 280, 56.0, 57.0), (160, 25600, 128, 512, 71.49, 512, 56.3, 57.0),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "hidden", "layers", "batch", "seconds", "gpus", "mfu", "hfu"), MFU)
def test_mfu_and_hfu(  # the columns of the table
    heads: int, hidden: int, layers: int, batch: int, seconds: float, gpus: int, mfu: float, hfu: float
) -> None:
    """arXiv 2205.05198 table 5: iteration times to model and hardware utilization, with selective recompute."""
    del heads
    peak = gpus * 312e12 * seconds
    common = {"num_layers": layers, "hidden": hidden, "sequence": 2048, "vocab": 51200, "num_sequences": batch}
    assert 100 * update_flops(**common) / peak == pytest.approx(mfu, abs=0.06)
    assert 100 * update_flops(**common, recomputing=Recomputing.SELECTIVE) / peak == pytest.approx(hfu, abs=0.06)


def test_recompute_costs() -> None:
    """Full: 4 units instead of 3, +33 %. Selective: s/6h, 2.8 % (175B) and 1.7 % (530B) at s = 2048."""
    assert full_recompute_factor() - 1 == pytest.approx(0.33, abs=0.004)
    assert recompute_factor(Recomputing.SELECTIVE, hidden=12288, sequence=2048) - 1 == pytest.approx(0.028, abs=0.0005)
    assert recompute_factor(Recomputing.SELECTIVE, hidden=20480, sequence=2048) - 1 == pytest.approx(0.017, abs=0.0005)
    assert recompute_factor(Recomputing.SELECTIVE) == 1.05


def test_sharded_writing() -> None:
    """4 hours of writing on one rank are 3.75 minutes on 64."""
    assert 4 * 60 / 64 == 3.75


@pytest.mark.parametrize(
    ("window", "save", "verdict"),
    [(12, 20, Outcome.DROP_WINDOW), (2, 20, Outcome.FITS), (12, 40, Outcome.DOES_NOT_FIT), (9, 20, Outcome.FITS)],
)
def test_the_shortest_link_decides(window: float, save: float, verdict: Outcome) -> None:
    """A pod grace of 600 s under stock torchrun is 30 s."""
    links = (link("aws-spot"), link("kubernetes=600s"), link("torchrun"))
    plan = plan_preempt(links, Steps(window_seconds=window, save_seconds=save, notice_seconds=1))
    assert (plan.limiting_link, plan.warning_seconds, plan.verdict) == ("torchrun", 30, verdict)
    assert (plan.remedy == "") == (verdict is Outcome.FITS)


def test_a_90_second_save_does_not_fit_a_90_second_warning() -> None:
    plan = plan_preempt(
        (Link(name="k", warning_seconds=90),), Steps(window_seconds=0, save_seconds=90, margin_seconds=1)
    )
    assert plan.verdict is Outcome.DOES_NOT_FIT
    assert plan.short_seconds == 2


def test_impossible_deadlines() -> None:
    with pytest.raises(UsageError, match="--chain"):
        plan_preempt((), Steps(window_seconds=1, save_seconds=1))
    with pytest.raises(UsageError, match="mystery=60s"):
        link("mystery")
    with pytest.raises(UsageError, match="write it like"):
        Steps(window_seconds=-1, save_seconds=1)


@pytest.mark.parametrize(
    ("recipe", "rule"),
    [
        (Recipe(base=Base.NF4), "quantized-full"),
        (Recipe(objective=Objective.PRETRAINING, trainable=Trainable.ADAPTERS), "adapters-from-scratch"),
        (Recipe(base=Base.FP16, compute=Compute.FP16), "fp16-weights"),
        (Recipe(device=Device.CUDA_WITHOUT_BF16), "no-bf16-units"),
        (Recipe(distillation=Distillation.SOFT_TARGETS, teacher=Teacher.TEXT_ONLY), "text-only-teacher"),
        (Recipe(distillation=Distillation.SOFT_TARGETS, teacher=Teacher.LOGITS_OTHER_VOCABULARY), "other-vocabulary"),
        (Recipe(distillation=Distillation.SEQUENCES), "no-teacher"),
    ],
)
def test_impossible_recipes(recipe: Recipe, rule: str) -> None:
    plan = plan_recipe(recipe)
    assert plan.verdict is RecipeVerdict.IMPOSSIBLE
    assert plan.findings[0].name == rule
    assert plan.findings[0].instead


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(trainable=Trainable.ADAPTERS, base=Base.NF4),
        Recipe(objective=Objective.CONTINUED, base=Base.BF16),
        Recipe(distillation=Distillation.SEQUENCES, teacher=Teacher.TEXT_ONLY),
        Recipe(compute=Compute.FP16, device=Device.CUDA_WITHOUT_BF16),
    ],
)
def test_possible_recipes(recipe: Recipe) -> None:
    assert plan_recipe(recipe).verdict is RecipeVerdict.POSSIBLE


def test_lengths_are_checked() -> None:
    with pytest.raises(UsageError, match="at least one line"):
        measure_lengths([])
    with pytest.raises(UsageError, match="write it like"):
        Lengths(mean_tokens=0)
