"""Plans as values: they survive JSON exactly, refuse what they did not write, and can be compared."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from samerun.core.units import parse_size
from samerun.errors import SchemaError
from samerun.plan import (
    BatchPlan,
    Layout,
    MemoryRequest,
    Mesh,
    Microbatch,
    Recipe,
    RunPlan,
    Saving,
    Schedule,
    Verdict,
    diff,
    from_json,
    gpt,
    plan_batch,
    plan_cost,
    plan_goodput,
    plan_interval,
    plan_memory,
    plan_noise,
    plan_preempt,
    plan_recipe,
    plan_scaling,
    plan_schedule,
    replan,
    to_json,
)
from samerun.plan.availability.deadline import Path, link
from samerun.plan.availability.goodput import GoodputRequest
from samerun.plan.availability.mtbf import rate_from_failures, stated_rate
from samerun.plan.availability.simulation import Tier
from samerun.plan.batch import BatchRequest
from samerun.plan.cost import CostRequest
from samerun.plan.memory.layouts import LayoutsRequest, plan_layouts
from samerun.plan.noise import Measured
from samerun.plan.scaling import Hyper
from samerun.plan.schedule import Keep, remap

SHAPE = gpt(num_layers=8, hidden_size=256, num_heads=8, vocab_size=1000, max_positions=512)
MEMORY = MemoryRequest(
    shape=SHAPE,
    layout=Layout(mesh=Mesh(num_ranks=8), zero_stage=3),
    batch=Microbatch(num_sequences=2, sequence_length=512, num_accumulated=4),
    device=parse_size("1GiB"),
)
BATCH = plan_batch(BatchRequest(global_batch=64, micro_batch=2, mesh=Mesh(num_ranks=8)))
SCHEDULE = plan_schedule(Schedule(peak_lr=1e-3, warmup=100, total=2000), 64)
INTERVAL = plan_interval(Saving(blocked_seconds=9), rate_from_failures(0, 1e6), num_simulated=50)


def every_plan() -> list[Any]:
    layouts = LayoutsRequest(memory=MEMORY, num_ranks=4, global_batch=8)
    durable = Tier(interval_seconds=600)
    return [
        plan_memory(MEMORY),
        plan_memory(MemoryRequest(num_params=10**9)),
        plan_layouts(layouts),
        INTERVAL,
        plan_goodput(GoodputRequest(rate=stated_rate(1e4), durable=durable, blocked_seconds=5), num_simulated=50),
        plan_preempt((link("torchrun"),), Path(window_seconds=1, save_seconds=2)),
        BATCH,
        remap(SCHEDULE, 128, done_updates=50, keep=Keep.DATA),
        plan_scaling(Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8), 64, 1024, num_samples=1000),
        plan_noise([Measured(small_squared_norm=5.25, big_squared_norm=0.5625)] * 3, 4, 64),
        plan_cost(CostRequest(num_params=1000, num_tokens=20_000)),
        plan_recipe(Recipe()),
        RunPlan(batch=BATCH, memory=plan_memory(MEMORY), schedule=SCHEDULE, interval=INTERVAL),
    ]


@pytest.mark.parametrize("plan", every_plan(), ids=lambda plan: plan.SCHEMA)
def test_json_gives_the_same_record(plan: Any) -> None:
    text = json.dumps(to_json(plan), allow_nan=False)
    back = from_json(json.loads(text))
    assert back == plan
    assert type(back) is type(plan)
    assert diff(plan, back) == ()


@pytest.mark.parametrize("plan", every_plan(), ids=lambda plan: plan.SCHEMA)
def test_records_are_frozen_and_have_slots(plan: Any) -> None:
    name = dataclasses.fields(plan)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(plan, name, None)
    assert not hasattr(plan, "__dict__")


def changed(**fields: Any) -> dict[str, Any]:
    return {**to_json(BATCH), **fields}


@pytest.mark.parametrize(
    "value",
    [
        changed(schema="samerun.plan.batch.v2"),
        changed(schema=None),
        {key: value for key, value in to_json(BATCH).items() if key != "schema"},
        changed(surprise=1),
        changed(global_batch="64"),
        changed(global_batch=None),
        {key: value for key, value in to_json(BATCH).items() if key != "micro_batch"},
        changed(mesh={"num_ranks": 7, "num_tensor": 2, "num_pipeline": 1, "num_context": 1}),
    ],
)
def test_what_no_plan_wrote_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        from_json(value)


def test_what_changes_if_i_lose_3_of_8_ranks() -> None:
    before = RunPlan(batch=BATCH, memory=plan_memory(MEMORY), schedule=SCHEDULE, interval=INTERVAL)
    after = replan(before, 5)
    changes = {change.path: (change.before, change.after) for change in diff(before, after)}
    assert changes["batch.num_accumulated"] == (4, 7)
    assert changes["batch.num_replicas_with_fewer"] == (0, 3)
    assert changes["batch.mesh.num_ranks"] == (8, 5)
    assert changes["memory.request.batch.num_accumulated"] == (4, 7)
    assert "batch.global_batch" not in changes
    assert not any(path.startswith("schedule") for path in changes)
    weights = changes["memory.terms.weights.lower_bytes"]
    assert weights[1] == pytest.approx(weights[0] * 8 / 5, rel=1e-6)


def test_plans_of_different_kinds_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        diff(BATCH, SCHEDULE)


def test_a_term_that_appears_or_goes_is_a_change() -> None:
    one = plan_memory(MEMORY)
    other = plan_memory(dataclasses.replace(MEMORY, layout=Layout(mesh=Mesh(num_ranks=8))))
    paths = {change.path for change in diff(one, other)}
    assert "terms.gathered groups" in paths
    assert "terms.gradient buckets" in paths


def test_measured_peak_is_held_against_the_upper_bound() -> None:
    memory = plan_memory(MEMORY)
    assert memory.verdict is Verdict.CANNOT_TELL or memory.verdict is Verdict.FITS
    assert memory.upper_bytes is not None
    plan = RunPlan(batch=BATCH, memory=memory, measured_peak_bytes=memory.upper_bytes // 2)
    assert plan.peak_over_upper == pytest.approx(0.5)
    assert RunPlan(batch=BATCH).peak_over_upper is None


def test_batch_plans_know_their_kind() -> None:
    assert isinstance(from_json(to_json(BATCH)), BatchPlan)
