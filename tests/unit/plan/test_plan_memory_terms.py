"""Terms that depend on the layout, suggestions and layouts: each derived by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samerun.core.units import parse_size
from samerun.errors import UsageError
from samerun.plan import (
    Family,
    Layout,
    LayoutsRequest,
    MemoryRequest,
    Mesh,
    Method,
    Microbatch,
    Optimizer,
    Precision,
    Save,
    Shape,
    Verdict,
    plan_layouts,
    plan_memory,
    suggest,
)
from samerun.plan.memory.activations import layer_bounds
from samerun.plan.memory.counts import rank_counts
from samerun.plan.memory.plan import judge
from samerun.plan.memory.request import Activations, Adapter, Attention, Loss, Recompute
from samerun.plan.memory.term import Phase

SHAPE = Shape(
    family=Family.LLAMA, num_layers=6, hidden_size=64, num_heads=4, num_kv_heads=2, head_size=16, ffn_size=160,
    vocab_size=1000,
)  # fmt: skip
MATRICES = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160
BLOCK = MATRICES + 2 * 64
REQUEST = MemoryRequest(shape=SHAPE, batch=Microbatch(num_sequences=2, sequence_length=48, num_accumulated=4))


def on(mesh: Mesh, **layout: object) -> MemoryRequest:
    return replace(REQUEST, layout=Layout(mesh=mesh, **layout))  # type: ignore[arg-type]


def test_counts() -> None:
    assert SHAPE.num_block_params == BLOCK
    assert SHAPE.num_params == 6 * BLOCK + 2 * 1000 * 64 + 64


def test_counts_of_a_rank() -> None:
    """Six layers on four stages: two on the fullest. Two key-value heads on four ranks: each held twice."""
    stages = on(Mesh(num_ranks=4, num_pipeline=4))
    first, last = (rank_counts(stages, is_last_stage=is_last) for is_last in (False, True))
    assert first.num_layers == last.num_layers == 2
    assert first.num_other == 2 * 128 + 1000 * 64
    assert last.num_other == 2 * 128 + 64 + 1000 * 64
    tensor = rank_counts(on(Mesh(num_ranks=4, num_tensor=4)), is_last_stage=True)
    kv = 64 * 16
    assert tensor.num_matrix == 6 * (64 * 16 + 2 * kv + 64 * 16 + 2 * 64 * 40 + 160 * 16)
    assert tensor.num_other == 6 * 128 + 64 + 2 * 250 * 64


def test_a_change_without_effect_is_no_suggestion() -> None:
    request = MemoryRequest(num_params=70 * 10**9, method=Method.QLORA, device=parse_size("24GiB"))
    assert [item.option for item in suggest(plan_memory(request))] == ["--ranks 2 --zero 3"]


def test_the_verdict_at_the_very_edge() -> None:
    assert judge(10, 20, 20) is Verdict.FITS
    assert judge(10, 20, 19) is Verdict.CANNOT_TELL
    assert judge(10, 20, 10) is Verdict.CANNOT_TELL
    assert judge(10, 20, 9) is Verdict.DOES_NOT_FIT
    assert judge(10, None, 10**9) is Verdict.CANNOT_TELL


def test_gradients_are_certain_in_forward_only_when_accumulating() -> None:
    """With one microbatch a window they do not exist before the backward; at the step they always do."""
    for accumulated, sure in ((1, 0), (4, 4 * SHAPE.num_params)):
        request = replace(REQUEST, batch=replace(REQUEST.batch, num_accumulated=accumulated))
        term = plan_memory(request).term("gradients")
        assert term.lower_in(Phase.FORWARD) == sure
        assert term.lower_in(Phase.STEP) == term.upper_in(Phase.BACKWARD) == 4 * SHAPE.num_params
        assert term.upper_in(Phase.SAVE) == 0


def test_first_stage_holds_as_many_microbatches_as_there_are_stages() -> None:
    """1F1B: min(p, K) in flight on the first stage, each a p-th of the layers; interleaving adds 1 + (p − 1)/(p·v)."""
    one = plan_memory(REQUEST).term("saved activations").lower_bytes
    first = plan_memory(on(Mesh(num_ranks=3, num_pipeline=3)))
    assert first.stage in ("first", "last")
    request = replace(on(Mesh(num_ranks=3, num_pipeline=3)), activations=Activations(loss=Loss.FUSED))
    assert plan_memory(request).term("saved activations").lower_bytes == pytest.approx(one, abs=2)
    short = replace(request, batch=replace(request.batch, num_accumulated=2))
    assert plan_memory(short).term("saved activations").lower_bytes == pytest.approx(one * 2 / 3, abs=2)
    twice = replace(request, layout=replace(request.layout, num_interleaved=2))
    assert plan_memory(twice).term("saved activations").lower_bytes == pytest.approx(one * (1 + 2 / 6), abs=2)


def test_fsdp_gathers_at_least_the_matrix_at_work() -> None:
    """bf16: the largest matrix at least; at most two blocks and the root, with fp32 gradients."""
    term = plan_memory(on(Mesh(num_ranks=4), zero_stage=3)).term("gathered groups")
    other = SHAPE.num_params - 6 * MATRICES
    assert term.lower_bytes == 2 * 64 * 160
    assert term.upper_bytes == (2 * BLOCK + other) * (2 + 4)


def test_unsharded_accumulation_keeps_full_gradients() -> None:
    names = [term.name for term in plan_memory(on(Mesh(num_ranks=4), zero_stage=3)).terms]
    assert "unsharded gradients" not in names
    term = plan_memory(on(Mesh(num_ranks=4), zero_stage=3, is_unsharded_accumulation=True)).term("unsharded gradients")
    assert (term.lower_bytes, term.upper_bytes) == (2 * SHAPE.num_params, 4 * SHAPE.num_params)


def test_ddp_buckets_are_a_second_copy_of_the_gradients_at_most() -> None:
    term = plan_memory(on(Mesh(num_ranks=2))).term("gradient buckets")
    assert (term.lower_bytes, term.upper_bytes) == (0, 4 * SHAPE.num_params)
    assert "gradient buckets" not in [term.name for term in plan_memory(REQUEST).terms]


def test_the_save_spike() -> None:
    """Weights and moments in fp32 are 12 bytes a parameter: staged once or twice; gathered: all shards."""
    state = 12 * SHAPE.num_params
    (staging,) = plan_memory(REQUEST).host_terms
    assert (staging.lower_bytes, staging.upper_bytes) == (state, 2 * state)
    (writing,) = plan_memory(replace(REQUEST, save=Save.BLOCKING)).host_terms
    assert (writing.lower_bytes, writing.upper_bytes) == (0, state)
    sharded = replace(on(Mesh(num_ranks=4), zero_stage=3), save=Save.FULL_GATHER)
    (gathered,) = plan_memory(sharded).host_terms
    assert gathered.upper_bytes == pytest.approx(state, abs=16)
    assert plan_memory(sharded).term("state gathered on the device").upper_bytes == state


def test_adapters() -> None:
    """r(in + out) for each matrix: 7 matrices of a block, or the attention's 4; a quantized base is not saved again."""
    all_in = sum(rows + columns for rows, columns in SHAPE.matrices)
    attention = sum(rows + columns for rows, columns in SHAPE.matrices[:4])
    for is_attention_only, sizes in ((False, all_in), (True, attention)):
        adapter = Adapter(rank=5, is_attention_only=is_attention_only)
        plan = plan_memory(replace(REQUEST, method=Method.QLORA, adapter=adapter))
        number = 6 * 5 * sizes
        assert plan.term("adapter weights").lower_bytes == 4 * number
        assert plan.term("adapter optimizer moments").lower_bytes == 8 * number
        assert plan.host_terms[0].lower_bytes == 12 * number
        assert plan.term("base weights (4 bit)").lower_bytes == 6 * MATRICES // 2
        assert plan.term("dequantized matrix").upper_bytes == 2 * 64 * 160


def test_lora_keeps_its_base_in_two_bytes() -> None:
    plan = plan_memory(replace(REQUEST, method=Method.LORA))
    assert plan.term("base weights (frozen)").lower_bytes == 2 * SHAPE.num_params


def test_segments() -> None:
    """6 layers: full 6 inputs, every-4 two, sqrt (√6 ≈ 2 segments of 3) two; each 2·s·b·h."""
    one = 2 * 48 * 2 * 64
    for mode, inputs, layers in ((Recompute.FULL, 6, 1), (Recompute.EVERY_K, 2, 4), (Recompute.SQRT, 2, 3)):
        plan = plan_memory(replace(REQUEST, activations=Activations(recompute=mode, segment_layers=4)))
        assert plan.term("saved segment inputs").lower_bytes == inputs * one
        layer = layer_bounds(REQUEST)
        working = plan.term("working set of backward")
        assert working.lower_bytes == int(layers * layer.lower)
        assert working.upper_bytes == pytest.approx((layers + 1) * layer.upper, abs=1)


def test_context_ranks_split_the_sequence() -> None:
    whole, split = layer_bounds(REQUEST), layer_bounds(on(Mesh(num_ranks=4, num_context=4)))
    assert (split.lower * 4, split.upper * 4) == (whole.lower, whole.upper)


def test_scores_appear_with_math_attention_only() -> None:
    """heads · s² · b scores, 2 bytes each at least."""
    math = replace(REQUEST, activations=Activations(attention=Attention.MATH))
    assert layer_bounds(math).lower - layer_bounds(REQUEST).lower == 2 * 4 * 48 * 48 * 2


def test_fp32_doubles_two_byte_activations() -> None:
    bounds = layer_bounds(replace(REQUEST, precision=Precision.FP32))
    assert bounds.lower == 2 * layer_bounds(REQUEST).lower


BIG = MemoryRequest(
    shape=replace(SHAPE, hidden_size=4096, head_size=1024, ffn_size=14336, num_layers=32, vocab_size=128256),
    batch=Microbatch(num_sequences=4, sequence_length=4096),
    activations=Activations(attention=Attention.MATH),
    layout=Layout(mesh=Mesh(num_ranks=8)),
    device=parse_size("80GiB"),
)


def test_suggestions_come_in_order_of_cost_and_are_whole_plans() -> None:
    plan = plan_memory(BIG)
    found = suggest(plan)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert [item.option for item in found] == [
        "--attention flash", "--micro 1 --accumulate 4", "--loss fused", "--zero 1", "--zero 2", "--zero 3",
        "--recompute full", "--optimizer adamw-8bit", "--ranks 16 --zero 3", "--method lora", "--method qlora",
    ]  # fmt: skip
    flash = replace(BIG, activations=replace(BIG.activations, attention=Attention.FLASH))
    first = found[0]
    assert (first.name, first.lower_bytes, first.upper_bytes) == (
        "fused attention", plan_memory(flash).lower_bytes, plan_memory(flash).upper_bytes,
    )  # fmt: skip
    sharded = next(item for item in found if item.option == "--zero 3")
    assert sharded.lower_bytes == plan_memory(replace(BIG, layout=replace(BIG.layout, zero_stage=3))).lower_bytes


def test_a_plan_that_fits_needs_no_suggestion() -> None:
    assert suggest(plan_memory(replace(REQUEST, device=parse_size("80GiB")))) == ()
    assert suggest(plan_memory(REQUEST)) == ()


def test_layouts_are_memory_plans_that_keep_the_batch() -> None:
    memory = replace(BIG, layout=Layout(), activations=Activations(recompute=Recompute.FULL))
    plan = plan_layouts(LayoutsRequest(memory=memory, num_ranks=8, global_batch=24))
    assert plan.choices
    assert plan.num_ruled_out > 0
    fits = [choice.verdict is Verdict.FITS for choice in plan.choices]
    assert fits == sorted(fits, reverse=True)
    for choice in plan.choices:
        assert choice.num_replicas * choice.num_tensor * choice.num_pipeline == 8
        assert choice.micro_batch * choice.num_replicas * choice.num_accumulated >= 24
        assert choice.micro_batch * choice.num_replicas * (choice.num_accumulated - 1) < 24
        assert choice.verdict is not Verdict.DOES_NOT_FIT
        assert (choice.headroom_bytes >= 0) == (choice.verdict is Verdict.FITS)
    with pytest.raises(UsageError, match="--device"):
        LayoutsRequest(memory=replace(memory, device=None), num_ranks=8, global_batch=24)


def test_impossible_requests() -> None:
    for wrong, said in (
        (lambda: Layout(is_sequence_parallel=True), "--tp 2"),
        (lambda: Layout(num_interleaved=2), "--pp 2"),
        (lambda: Layout(zero_stage=-1), "--zero 0, 1, 2 or 3"),
        (lambda: Microbatch(num_sequences=0), "--micro 2"),
        (lambda: Microbatch(sequence_length=-1), "--seq 4096"),
        (lambda: Adapter(rank=0), "--rank 16"),
        (lambda: MemoryRequest(), "--params 70e9"),
        (lambda: MemoryRequest(num_params=0), "--params 70e9"),
        (lambda: MemoryRequest(num_params=9, device=parse_size("0GiB")), "--device 24GiB"),
        (lambda: replace(REQUEST, method=Method.QLORA, precision=Precision.BF16_MASTER), "no fp32 master"),
        (lambda: Mesh(num_ranks=0), "num_ranks"),
    ):
        with pytest.raises(UsageError) as refused:
            wrong()
        assert said in str(refused.value)


def test_8_bit_moments_are_bounded_with_a_shape() -> None:
    plan = plan_memory(replace(REQUEST, optimizer=Optimizer.ADAMW_8BIT))
    term = plan.term("optimizer moments (8 bit)")
    assert term.lower_bytes == 2 * SHAPE.num_params
    assert term.upper_bytes == pytest.approx(SHAPE.num_params * (2 + 8 / 256) + 6 * 6 * 128, abs=1)


def test_a_suggestion_that_is_impossible_is_left_out() -> None:
    """QLoRA has no fp32 master: the change is left out, not an error."""
    request = replace(BIG, precision=Precision.BF16_MASTER)
    assert "--method qlora" not in [item.option for item in suggest(plan_memory(request))]
