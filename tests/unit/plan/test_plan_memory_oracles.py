"""Published memory figures. Each test names its source; figures quoted from papers are the printed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samerun.core.units import parse_size
from samerun.errors import UsageError
from samerun.plan import (
    Family,
    Layout,
    MemoryRequest,
    Mesh,
    Method,
    Microbatch,
    Optimizer,
    Precision,
    Quantization,
    Shape,
    Verdict,
    gpt,
    plan_memory,
)
from samerun.plan.memory.activations import layer_bounds
from samerun.plan.memory.published import (
    interleaving_factor,
    korthikanti_full_recompute_bytes,
    korthikanti_layer_bytes,
    nf4_bits_per_param,
    rule_of_thumb_layer_bytes,
    sqrt_segments,
    zero_state_bytes,
)
from samerun.plan.memory.request import NUMBER_BYTES, Activations, Attention, Recompute

GB = 10**9
GIB = 2**30
MIB = 2**20


def state_bytes(request: MemoryRequest) -> int:
    """Weights, gradients, masters, moments: what the published grids count."""
    names = ("weights", "gradients", "fp32 master weights", "optimizer moments")
    return sum(term.lower_bytes for term in plan_memory(request).terms if term.name in names)


ZERO_GRID = [
    (1, 7.5e9, "120, 120, 120"),
    (4, 7.5e9, "52.5, 41.25, 30"),
    (16, 7.5e9, "35.62, 21.56, 7.5"),
    (64, 7.5e9, "31.4, 16.6, 1.9"),
    (256, 7.5e9, "30.35, 15.41, 0.47"),
    (1024, 7.5e9, "30.09, 15.10, 0.12"),
    (1, 128e9, "2048, 2048, 2048"),
    (4, 128e9, "896, 704, 512"),
    (16, 128e9, "608, 368, 128"),
    (64, 128e9, "536, 284, 32"),
    (256, 128e9, "518, 263, 8"),
    (1024, 128e9, "513.5, 257.75, 2"),
    (1, 1e12, "16000, 16000, 16000"),
    (4, 1e12, "7000, 5500, 4000"),
    (16, 1e12, "4750, 2875, 1000"),
    (64, 1e12, "4187.5, 2218.75, 250"),
    (256, 1e12, "4046.9, 2054.7, 62.5"),
    (1024, 1e12, "4011.7, 2013.7, 15.6"),
]


@pytest.mark.parametrize(("shards", "params", "printed"), ZERO_GRID)
def test_zero_grid(shards: int, params: float, printed: str) -> None:
    """ZeRO (arXiv 1910.02054) figure 1 and table 1, GB = 10^9; stages 1, 2, 3 of 7.5B, 128B and 1T parameters."""
    for stage, figure in enumerate(printed.split(", "), 1):
        layout = Layout(mesh=Mesh(num_ranks=shards), zero_stage=stage)
        request = MemoryRequest(num_params=int(params), precision=Precision.BF16_MASTER, layout=layout)
        found = state_bytes(request)
        unit = 10.0 ** -len(figure.partition(".")[2])  # of the last printed digit; the paper truncates some figures
        assert found / GB == pytest.approx(float(figure), abs=unit)
        assert found == pytest.approx(zero_state_bytes(params, shards, stage), abs=4)  # each of four terms rounds up


@pytest.mark.parametrize(
    ("precision", "per_param"),
    [
        (Precision.FP32, 16),
        (Precision.BF16, 16),
        (Precision.FP16, 16),
        (Precision.BF16_MASTER, 16),
        (Precision.BF16_MASTER_FP32_GRADS, 18),
        (Precision.BF16_PURE, 8),
    ],
)
def test_bytes_per_parameter(precision: Precision, per_param: int) -> None:
    """16 B for fp32 Adam and for mixed precision; 18 in Megatron-LM without the distributed optimizer."""
    assert state_bytes(MemoryRequest(num_params=10**9, precision=precision)) == per_param * 10**9
    each = NUMBER_BYTES[precision]
    assert each.weight + each.grad + each.master + 2 * each.moment == per_param


def test_125m_parameters_take_2_gb() -> None:
    """The fp32 example: 4 numbers of 4 bytes a parameter, 125 million parameters, about 2.0 GB."""
    assert state_bytes(MemoryRequest(num_params=125_000_000, precision=Precision.FP32)) == 2 * GB


def test_accelerate_bert_base_adam() -> None:
    """accelerate estimate-memory bert-base-cased: 413.18 MiB, 1.61 GiB with Adam, from 108,310,272 parameters.

    The printed weights hold some KiB of buffers, which the parameters do not.
    """
    params = 108_310_272
    assert 4 * params / MIB == pytest.approx(413.18, abs=0.01)
    assert state_bytes(MemoryRequest(num_params=params, precision=Precision.FP32)) / GIB == pytest.approx(
        1.61, abs=0.005
    )


def test_70b_full_state_dict() -> None:
    """140 decimal GB of bf16 weights and two fp32 moments of 280: 700 GB, before any master weights."""
    plan = plan_memory(MemoryRequest(num_params=70 * 10**9, precision=Precision.BF16_MASTER))
    assert plan.term("weights").lower_bytes == 140 * GB
    assert plan.term("optimizer moments").lower_bytes == 560 * GB
    assert plan.term("fp32 master weights").lower_bytes == 280 * GB


@pytest.mark.parametrize(
    ("optimizer", "per_param"), [(Optimizer.SGD, 8), (Optimizer.MOMENTUM, 12), (Optimizer.ADAMW, 16)]
)
def test_optimizers(optimizer: Optimizer, per_param: int) -> None:
    """fp32: 4 for weights, 4 for gradients, 0, 4 or 8 for moments."""
    assert (
        state_bytes(MemoryRequest(num_params=10**6, precision=Precision.FP32, optimizer=optimizer)) == per_param * 10**6
    )


def test_8_bit_adam_keeps_k_at_6() -> None:
    """fp32 master 4 + two moments of 1 byte: K = 6 instead of 12 (arXiv 2110.02861), block constants beside it."""
    request = MemoryRequest(num_params=10**9, precision=Precision.BF16_MASTER, optimizer=Optimizer.ADAMW_8BIT)
    plan = plan_memory(request)
    moments = plan.term("optimizer moments (8 bit)")
    assert plan.term("fp32 master weights").lower_bytes + moments.lower_bytes == 6 * 10**9
    assert moments.upper_bytes is not None
    assert moments.lower_bytes < moments.upper_bytes < 2.1e9


KORTHIKANTI = [  # heads, hidden, micro, none, TP, TP+SP, TP+selective, TP+SP+selective, full: GiB per layer
    (64, 6144, 4, 6.594, 1.234, 0.824, 0.609, 0.199, 0.094),
    (96, 12288, 1, 2.672, 0.539, 0.334, 0.305, 0.100, 0.047),
    (128, 20480, 1, 3.828, 0.820, 0.479, 0.508, 0.166, 0.078),
    (160, 25600, 1, 4.785, 1.025, 0.598, 0.635, 0.208, 0.098),
]


@pytest.mark.parametrize("row", KORTHIKANTI)
def test_korthikanti_per_layer(row: tuple[float, ...]) -> None:
    """arXiv 2205.05198 table 2 with the configurations of its table 3: s = 2048, t = 8."""
    heads, hidden, micro = (int(value) for value in row[:3])

    def layer(*, tensor: int = 8, sharded_norms: bool = False, selective: bool = False) -> float:
        return korthikanti_layer_bytes(
            hidden=hidden, heads=heads, sequence=2048, micro=micro, tensor=tensor, sharded_norms=sharded_norms,
            selective=selective,
        ) / GIB  # fmt: skip

    found = (
        layer(tensor=1), layer(), layer(sharded_norms=True), layer(selective=True),
        layer(sharded_norms=True, selective=True),
        korthikanti_full_recompute_bytes(hidden=hidden, sequence=2048, micro=micro) / GIB,
    )  # fmt: skip
    assert found == pytest.approx(row[3:], abs=0.0005)


@pytest.mark.parametrize(
    ("index", "layers", "stages", "interleaved", "first", "least"),
    [
        (0, 48, 1, 1, 59.25, 9.56),
        (1, 96, 8, 3, 66.84, 12.35),
        (2, 105, 35, 3, 114.0, 23.08),
        (3, 128, 64, 1, 131.3, 26.56),
    ],
)
def test_korthikanti_first_stage(  # the columns of the table
    index: int, layers: int, stages: int, interleaved: int, first: float, least: float
) -> None:
    """Totals of the first pipeline stage: L layers whatever p is, times 1 + (p − 1)/(p·v) when interleaved."""
    heads, hidden, micro = (int(value) for value in KORTHIKANTI[index][:3])
    factor = layers * interleaving_factor(stages, interleaved)
    size = korthikanti_layer_bytes(hidden=hidden, heads=heads, sequence=2048, micro=micro, tensor=8)
    lean = korthikanti_layer_bytes(
        hidden=hidden, heads=heads, sequence=2048, micro=micro, tensor=8, sharded_norms=True, selective=True
    )
    assert size * factor / GIB == pytest.approx(first, rel=0.001)
    assert lean * factor / GIB == pytest.approx(least, rel=0.001)


def test_selective_saves_70_and_65_percent() -> None:
    """arXiv 2205.05198 abstract and §6: 80/114 of the layer for 175B, 64/98 for 530B."""
    for (heads, hidden), saved in (((96, 12288), 80 / 114), ((128, 20480), 64 / 98)):
        full = korthikanti_layer_bytes(hidden=hidden, heads=heads, sequence=2048)
        lean = korthikanti_layer_bytes(hidden=hidden, heads=heads, sequence=2048, selective=True)
        assert 1 - lean / full == pytest.approx(saved, abs=1e-12)


def gpt_request(heads: int, hidden: int, layers: int, *, tensor: int = 1, sp: bool = False) -> MemoryRequest:
    shape = gpt(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=51200, max_positions=2048)
    layout = Layout(mesh=Mesh(num_ranks=tensor, num_tensor=tensor), is_sequence_parallel=sp)
    batch = Microbatch(num_sequences=1, sequence_length=2048)
    return MemoryRequest(
        shape=shape, layout=layout, batch=batch, activations=Activations(attention=Attention.MATH),
        precision=Precision.BF16_MASTER,
    )  # fmt: skip


@pytest.mark.parametrize(("tensor", "sp"), [(1, False), (8, False), (8, True)])
def test_our_upper_bound_of_a_gpt_layer_is_the_published_formula(tensor: int, sp: bool) -> None:
    """34sbh + 5as²b, with tensor and sequence parallelism; ours adds the norms' statistics, 16 B a token."""
    published = korthikanti_layer_bytes(hidden=12288, heads=96, sequence=2048, tensor=tensor, sharded_norms=sp)
    ours = layer_bounds(gpt_request(96, 12288, 96, tensor=tensor, sp=sp))
    assert ours.upper == pytest.approx(published + 16 * 2048 / (tensor if sp else 1), rel=1e-12)
    assert ours.lower < published


def test_fused_attention_leaves_selective_nothing_to_save() -> None:
    """Megatron-LM#1225: with flash attention the 5as/h term is absent, so selective recompute saves next to nothing."""
    request = gpt_request(96, 12288, 2)
    flash = replace(request, activations=Activations(attention=Attention.FLASH))
    selective = replace(flash, activations=replace(flash.activations, recompute=Recompute.SELECTIVE))
    before, after = plan_memory(flash), plan_memory(selective)
    assert before.term("saved activations").upper_bytes == after.term("saved activations").upper_bytes


PARAMETERS = [
    (24, 2304, 1.7), (30, 3072, 3.6), (36, 4096, 7.5), (40, 6144, 18.4), (48, 8192, 39.1), (60, 10240, 76.1),
    (80, 12288, 145.6), (96, 16384, 310.1), (105, 20480, 529.6), (128, 25600, 1008.0),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "hidden", "billions"), PARAMETERS)
def test_megatron_parameter_counts(layers: int, hidden: int, billions: float) -> None:
    """arXiv 2104.04473 table 1, V = 51200, s = 2048."""
    shape = gpt(num_layers=layers, hidden_size=hidden, num_heads=hidden // 128, vocab_size=51200, max_positions=2048)
    assert shape.num_params / 1e9 == pytest.approx(billions, abs=0.05)
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert shape.num_params == pytest.approx(formula + 2 * hidden, rel=1e-12)  # the final norm, which the formula omits


LLAMA_3_8B = Shape(
    family=Family.LLAMA, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_size=128, ffn_size=14336,
    vocab_size=128256,
)  # fmt: skip


def llama_like(hidden: int, heads: int, kv: int, head: int, ffn: int, *, qk: bool = False) -> Shape:
    return Shape(
        family=Family.LLAMA, num_layers=4, hidden_size=hidden, num_heads=heads, num_kv_heads=kv, head_size=head,
        ffn_size=ffn, vocab_size=1000, has_qk_norm=qk,
    )  # fmt: skip


MEASURED_COPIES = [
    (llama_like(960, 15, 5, 64, 2560), 24.0),  # SmolLM2-360M
    (LLAMA_3_8B, 28.0),
    (llama_like(4096, 32, 8, 128, 14336), 28.0),  # Mistral-7B
    (llama_like(4096, 32, 8, 128, 12288, qk=True), 29.8),  # R1-Qwen3-8B
    (llama_like(2560, 32, 8, 128, 9728, qk=True), 38.0),  # Qwen3-4B
    (replace(llama_like(2048, 8, 1, 256, 16384), family=Family.GEMMA), 48.0),  # gemma-1.1-2b
]


@pytest.mark.parametrize(("shape", "copies"), MEASURED_COPIES)
def test_measured_hidden_state_copies_lie_within_the_bounds(shape: Shape, copies: float) -> None:
    """Copies of 2·s·b·h per layer measured in eager transformers by ml-engineering: never over, at most 15 % under."""
    request = MemoryRequest(shape=shape, batch=Microbatch(sequence_length=4096))
    bounds = layer_bounds(request).times(1 / (2 * 4096 * shape.hidden_size))
    assert bounds.lower < copies <= bounds.upper
    assert bounds.upper < 1.15 * copies


def test_long_context_llama_3_8b() -> None:
    """ml-engineering, s = 32768, b = 1: hidden state 0.25 GiB, by block 8, all 224, fp32 logits 15.66."""
    request = MemoryRequest(shape=LLAMA_3_8B, batch=Microbatch(sequence_length=32768))
    hidden_state = 2 * 32768 * 4096
    assert hidden_state / GIB == 0.25
    blockwise = replace(request, activations=Activations(recompute=Recompute.FULL))
    assert plan_memory(blockwise).term("saved segment inputs").lower_bytes / GIB == 8
    saved = plan_memory(request).term("saved activations")
    assert saved.upper_bytes is not None
    assert saved.lower_bytes < 224 * GIB <= saved.upper_bytes < 1.15 * 224 * GIB
    assert plan_memory(request).term("logits and loss").lower_bytes / GIB == pytest.approx(15.66, abs=0.005)


def test_rule_of_thumb() -> None:
    """About 12·B·L·d floats: d = 8192, L = 8192, B = 1 is about 1.6 GB a layer in bf16; 64 layers about 103 GB."""
    layer = rule_of_thumb_layer_bytes(hidden=8192, sequence=8192)
    assert layer / GB == pytest.approx(1.6, abs=0.05)
    assert 64 * layer / GB == pytest.approx(103, abs=0.5)
    request = MemoryRequest(shape=llama_like(8192, 64, 8, 128, 28672), batch=Microbatch(sequence_length=8192))
    bounds = layer_bounds(request)
    assert bounds.lower < layer < bounds.upper


def test_square_root_rule() -> None:
    """arXiv 1604.06174: about √L segments, 8 at L = 64; 2√(Lac) bounds what segments of whole layers can reach."""
    assert sqrt_segments(64) == 8
    assert sqrt_segments(1) == 1
    boundary, layer = 2, 34

    def kept(layers: int, segments: int) -> float:
        return segments * boundary + layers / segments * layer

    for layers, best, at, bound, none in ((32, 98, 32, 93.3, 1088), (96, 164, 48, 161.6, 3264)):
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        assert min(kept(layers, n) for n in divisors) == best == kept(layers, at)
        assert 2 * (layers * layer * boundary) ** 0.5 == pytest.approx(bound, abs=0.05)
        assert layers * layer == none


QLORA_IDEAL = [(7, 3.61), (13, 6.71), (33, 17.02), (65, 33.53)]


@pytest.mark.parametrize(("billions", "ideal"), QLORA_IDEAL)
def test_qlora_base(billions: int, ideal: float) -> None:
    """NF4 with double quantization: 4.127 bits a parameter; derived from arXiv 2305.14314 §3."""
    request = MemoryRequest(num_params=billions * 10**9, method=Method.QLORA, quantization=Quantization.NF4_DOUBLE)
    plan = plan_memory(request)
    base = plan.term("base weights (4 bit)").lower_bytes + plan.term("quantization constants").lower_bytes
    assert base / GB == pytest.approx(ideal, abs=0.006)


def test_qlora_bits() -> None:
    """4 + 32/64 = 4.5 bits; double quantization 4 + 8/64 + 32/(64·256) = 4.127: 0.373 bits less, 3.03 GB of 65B."""
    assert nf4_bits_per_param(is_double=False) == 4.5
    assert nf4_bits_per_param(is_double=True) == pytest.approx(4.127, abs=0.0005)
    saved = nf4_bits_per_param(is_double=False) - nf4_bits_per_param(is_double=True)
    assert saved == pytest.approx(0.373, abs=0.0005)
    assert saved / 8 * 65 == pytest.approx(3.03, abs=0.005)


LLAMA_65B = Shape(
    family=Family.LLAMA, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=64, head_size=128, ffn_size=22016,
    vocab_size=32000,
)  # fmt: skip


def test_qlora_65b_trains_on_48_gb_as_published() -> None:
    """arXiv 2305.14314: 65B on one 48 GB GPU, 41 GB measured: not ruled out, and the bounds hold the measurement."""
    request = MemoryRequest(
        shape=LLAMA_65B,
        method=Method.QLORA,
        precision=Precision.BF16_PURE,
        quantization=Quantization.NF4_DOUBLE,
        batch=Microbatch(sequence_length=512),
        activations=Activations(recompute=Recompute.FULL),
        device=parse_size("48GB"),
    )
    plan = plan_memory(request)
    assert plan.verdict is not Verdict.DOES_NOT_FIT
    assert plan.upper_bytes is not None
    assert plan.lower_bytes < 41 * GB < plan.upper_bytes


def test_65b_in_16_bits_needs_more_than_780_gb() -> None:
    """arXiv 2305.14314 abstract: regular 16-bit finetuning of 65B takes more than 780 GB of GPU memory."""
    plan = plan_memory(MemoryRequest(num_params=65 * 10**9, precision=Precision.BF16_MASTER))
    assert plan.lower_bytes > 780 * GB


def test_qlora_7b_published_base() -> None:
    """arXiv 2305.14314 §2: a 4-bit LLaMA-7B base was seen at 5,048 MB.

    The tensors alone are less; the measured figure holds what the process has beside them, so it is our lower bound
    that is tested, and our upper bound with the reserve.
    """
    shape = Shape(
        family=Family.LLAMA, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, head_size=128,
        ffn_size=11008, vocab_size=32000,
    )  # fmt: skip
    assert shape.num_params == 6_738_415_616
    plan = plan_memory(MemoryRequest(shape=shape, method=Method.QLORA, precision=Precision.BF16_PURE))
    names = ("base weights (4 bit)", "quantization constants", "higher-precision tensors")
    lower = sum(plan.term(name).lower_bytes for name in names)
    upper = sum(plan.term(name).upper_bytes or 0 for name in (*names, "context, buffers, fragmentation"))
    assert lower < 5048e6 < upper


def test_deepspeed_estimates_derive_from_18_bytes() -> None:
    """DeepSpeed's estimators (GiB, called GB): t5-3b on 8 GPUs. Stage 2: 2P + 18P/N; stage 3: 4·largest + 18P/N."""
    params, largest = 2851e6, 32e6
    each = NUMBER_BYTES[Precision.BF16_MASTER_FP32_GRADS]
    per_param = each.weight + each.grad + each.master + 2 * each.moment
    assert (2 * params + per_param * params / 8) / GIB == pytest.approx(11.28, abs=0.01)
    assert (4 * largest + per_param * params / 8) / GIB == pytest.approx(6.09, abs=0.01)


def test_impossible_meshes_are_refused_with_the_nearest_right_one() -> None:
    batch = Microbatch(sequence_length=2048)
    shape = gpt(num_layers=4, hidden_size=96, num_heads=12, vocab_size=100, max_positions=4096)

    def request(mesh: Mesh, **layout: int) -> MemoryRequest:
        return MemoryRequest(shape=shape, batch=batch, layout=Layout(mesh=mesh, **layout))

    with pytest.raises(UsageError, match=r"does not divide num_heads 12; the nearest that do: 4, 6, 12"):
        request(Mesh(num_ranks=8, num_tensor=8))
    with pytest.raises(UsageError, match="need at least that many layers"):
        request(Mesh(num_ranks=8, num_pipeline=8))
    with pytest.raises(UsageError, match="does not divide sequence length"):
        request(Mesh(num_ranks=3, num_context=3))
    with pytest.raises(UsageError, match=r"4096 positions"):
        MemoryRequest(shape=shape, batch=Microbatch(sequence_length=8192))
    with pytest.raises(UsageError, match="disagree"):
        MemoryRequest(shape=shape, num_params=10**9)
