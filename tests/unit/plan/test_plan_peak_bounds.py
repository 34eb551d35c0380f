"""Bounds that share what they have counted equal those of a fresh plan, whatever the order of the questions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samerun.core.units import parse_size
from samerun.errors import UsageError
from samerun.plan import (
    Activations,
    Attention,
    Family,
    Layout,
    MemoryRequest,
    Mesh,
    Method,
    Microbatch,
    Optimizer,
    Precision,
    Recompute,
    Save,
    Shape,
    plan_memory,
)
from samerun.plan.memory.plan import PeakBounds

SHAPE = Shape(
    family=Family.LLAMA, num_layers=7, hidden_size=96, num_heads=12, num_kv_heads=4, head_size=8, ffn_size=264,
    vocab_size=1013,
)  # fmt: skip
BASE = MemoryRequest(
    shape=SHAPE, batch=Microbatch(sequence_length=26), device=parse_size("80GiB"), reserve_bytes=0,
    activations=Activations(attention=Attention.MATH),
)  # fmt: skip
LAYOUTS = [
    Layout(
        mesh=Mesh(num_ranks=replicas * tensor * pipeline * context, num_tensor=tensor, num_pipeline=pipeline,
                  num_context=context),
        zero_stage=stage,
        is_sequence_parallel=sequence,
        num_interleaved=interleaved,
        is_unsharded_accumulation=unsharded,
    )
    for replicas in (1, 3)
    for tensor, sequence in ((1, False), (2, False), (2, True))
    for pipeline, interleaved in ((1, 1), (3, 1), (3, 2))
    for context in (1, 2)
    for stage, unsharded in ((0, False), (1, False), (2, False), (3, False), (3, True))
]  # fmt: skip
BATCHES = [
    Microbatch(num_sequences=micro, sequence_length=26, num_accumulated=accumulated)
    for micro, accumulated in ((1, 1), (1, 2), (3, 7))
]


@pytest.mark.parametrize(
    "request_",
    [
        BASE,
        replace(BASE, activations=Activations(recompute=Recompute.SQRT), precision=Precision.BF16_MASTER),
        replace(BASE, method=Method.QLORA, optimizer=Optimizer.ADAMW_8BIT, save=Save.FULL_GATHER),
        replace(BASE, save=Save.FULL_GATHER, optimizer=Optimizer.MOMENTUM, precision=Precision.FP32),
    ],
    ids=["full", "sqrt", "qlora", "gather"],
)
def test_shared_bounds_are_those_of_a_fresh_plan(request_: MemoryRequest) -> None:
    peaks = PeakBounds()
    for layout in LAYOUTS:
        for batch in BATCHES:
            asked = replace(request_, layout=layout, batch=batch)
            plan = plan_memory(asked)
            assert peaks.of(asked) == (plan.lower_bytes, plan.upper_bytes), asked


def test_an_unknown_size_makes_the_largest_unknown() -> None:
    peaks = PeakBounds()
    without_length = replace(BASE, batch=Microbatch())
    assert peaks.of(without_length) == (plan_memory(without_length).lower_bytes, None)


def test_impossible_layouts_are_refused_before_they_are_counted() -> None:
    with pytest.raises(UsageError, match="does not divide num_heads"):
        replace(BASE, layout=Layout(mesh=Mesh(num_ranks=5, num_tensor=5)))
