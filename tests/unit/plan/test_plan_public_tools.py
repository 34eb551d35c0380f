"""What other public estimators print, derived from their formulas, and where this plan agrees or differs.

They are oracles of conventions, not of truth: each test says what its tool leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from samerun.errors import UsageError
from samerun.plan import Layout, MemoryRequest, Mesh, Microbatch, Precision, gpt, plan_memory, shape_of_config
from samerun.plan.memory.activations import layer_bounds
from samerun.plan.memory.published import korthikanti_layer_bytes
from samerun.plan.memory.request import Activations, Recompute

GIB = 2**30
MIB = 2**20
TIB = 2**40
STATE = ("weights", "gradients", "fp32 master weights", "optimizer moments")


def zero_3(num_params: int, num_ranks: int) -> dict[str, int]:
    """Our terms of one rank under ZeRO-3 with 18 bytes a parameter, which is DeepSpeed's convention."""
    layout = Layout(mesh=Mesh(num_ranks=num_ranks), zero_stage=3)
    request = MemoryRequest(num_params=num_params, precision=Precision.BF16_MASTER_FP32_GRADS, layout=layout)
    return {term.name: term.lower_bytes for term in plan_memory(request).terms if term.name in STATE}


def t5_large() -> tuple[int, int]:
    """(parameters, those of the largest module) of t5-large: 24 + 24 layers, d 1024, feed-forward 4096, tied head."""
    width, ffn, layers = 1024, 4096, 24
    embedding = 32128 * width
    encoder = layers * (4 * width**2 + 2 * width * ffn + 2 * width)
    decoder = layers * (8 * width**2 + 2 * width * ffn + 3 * width)
    position_bias = 2 * 32 * 16  # buckets × heads, once in each stack
    return embedding + encoder + decoder + position_bias + 2 * width, embedding


def test_deepspeed_t5_large_on_4_gpus() -> None:
    """DeepSpeed's memory page: 737.67M parameters, 32.90M largest; 3291, 125, 477 MiB (called MB, cut, not rounded).

    Nothing offloaded: 4·largest + 18P/N; both offloaded: 4·largest; only the optimizer offloaded: 4·largest + 2P/N.
    """
    params, largest = t5_large()
    assert (round(params / 1e6, 2), round(largest / 1e6, 2)) == (737.67, 32.90)
    ours = zero_3(params, 4)
    assert (4 * largest + sum(ours.values())) >> 20 == 3291
    assert 4 * largest >> 20 == 125
    assert (4 * largest + ours["weights"]) >> 20 == 477


def test_deepspeed_6805m_on_4_gpus() -> None:
    """DeepSpeed#4527: 6805M parameters, 131M largest, 4 GPUs: 29.01, 3.66, 0.49 GiB; host 171.13, 152.11, 2.93 GiB.

    Counts are printed to the million, so sizes are known to 0.01 or 0.02 GiB. In that report the process was seen to
    use 14,678 to 21,272 MiB with both offloads on: model states are not the peak, and without a shape ours names no
    upper bound.
    """
    params, largest = 6_805_000_000, 131_000_000
    ours = zero_3(params, 4)
    assert (4 * largest + sum(ours.values())) / GIB == pytest.approx(29.01, abs=0.01)
    assert (4 * largest + ours["weights"]) / GIB == pytest.approx(3.66, abs=0.01)
    assert 4 * largest / GIB == pytest.approx(0.49, abs=0.01)
    assert 1.5 * 18 * params / GIB == pytest.approx(171.13, abs=0.02)
    assert 1.5 * 4 * 4 * params / GIB == pytest.approx(152.11, abs=0.02)
    assert 1.5 * 4 * 4 * largest / GIB == pytest.approx(2.93, abs=0.01)
    plan = plan_memory(MemoryRequest(num_params=params))
    assert plan.upper_bytes is None
    assert {"activations", "logits"} <= {term.name for term in plan.unknown_terms}


def test_deepspeed_t5_3b_on_8_gpus() -> None:
    """DeepSpeed's memory page, 2851M parameters, 32M largest, GiB: the page and the code disagree on stage 2.

    The page prints 15.93 (4P + 16P/N); the code says 2P + 18P/N = 11.28 (tested beside the 18 bytes).
    """
    params, largest = 2_851_000_000, 32_000_000
    ours = zero_3(params, 8)
    assert 2 * params / GIB == pytest.approx(5.31, abs=0.005)
    assert (4 * params + 16 * params / 8) / GIB == pytest.approx(15.93, abs=0.005)
    assert (4 * largest + sum(ours.values())) / GIB == pytest.approx(6.09, abs=0.01)
    assert (4 * largest + ours["weights"]) / GIB == pytest.approx(0.78, abs=0.005)
    assert 4 * largest / GIB == pytest.approx(0.12, abs=0.005)
    for per_param, printed in ((4 * 8, 127.45), (18, 71.69), (16, 63.72)):
        assert 1.5 * per_param * params / GIB == pytest.approx(printed, abs=0.005)
    assert 1.5 * 4 * 8 * largest / GIB == pytest.approx(1.43, abs=0.005)


def bert_base_cased() -> tuple[int, int]:
    """(parameters, buffer bytes): 12 layers of 768, feed-forward 3072, 28,996 tokens, a pooler; two int64 [1, 512]."""
    width, ffn = 768, 3072
    norm = 2 * width
    embeddings = (28996 + 512 + 2) * width + norm
    layer = 4 * (width**2 + width) + width * ffn + ffn + ffn * width + width + 2 * norm
    return embeddings + 12 * layer + width**2 + width, 2 * 512 * 8


def test_accelerate_bert_base_cased() -> None:
    """accelerate estimate-memory: fp32 413.18, fp16 206.59 MiB; largest layer 84.95; Adam 1.61 GiB, fp16 826.36 MiB.

    The tool counts buffers among the weights and takes four times that as Adam's need. 413.68 MiB were seen on a GPU.
    """
    params, buffers = bert_base_cased()
    assert params == 108_310_272
    printed = (4 * params + buffers) / MIB
    assert printed == pytest.approx(413.18, abs=0.005)
    largest_bytes = 28996 * 768 * 4
    assert largest_bytes / MIB == pytest.approx(84.95, abs=0.01)
    assert 4 * printed / 1024 == pytest.approx(1.61, abs=0.005)
    assert printed / 2 == pytest.approx(206.59, abs=0.005)
    assert 4 * printed / 2 == pytest.approx(826.36, abs=0.01)
    ours = plan_memory(MemoryRequest(num_params=params, precision=Precision.FP32))
    state = sum(ours.term(name).lower_bytes for name in STATE if name != "fp32 master weights")
    assert state == 16 * params
    assert 4 * printed * MIB - state == 4 * buffers
    assert ours.term("weights").lower_bytes / MIB < 413.68 < printed + 1  # the allocator rounds each tensor up


def resnet50() -> tuple[int, int]:
    """(parameters, buffer bytes): stages of 3, 4, 6, 3 bottlenecks; each norm has two statistics and a counter."""
    params, features, norms, inputs = 3 * 64 * 49, 64, 1, 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            params += inputs * width + 9 * width * width + width * 4 * width
            features += width + width + 4 * width
            norms += 3
            if block == 0:
                params += inputs * 4 * width
                features += 4 * width
                norms += 1
            inputs = 4 * width
    return params + 2 * features + 2048 * 1000 + 1000, 2 * 4 * features + 8 * norms


def test_accelerate_resnet50() -> None:
    """accelerate estimate-memory timm/resnet50.a1: 97.7 MiB and 390.78 MiB for Adam, statistics included."""
    params, buffers = resnet50()
    assert (params, buffers) == (25_557_032, 4 * 53_120 + 8 * 53)
    assert (4 * params + buffers) / MIB == pytest.approx(97.7, abs=0.005)
    assert 4 * (4 * params + buffers) / MIB == pytest.approx(390.78, abs=0.005)


def test_accelerate_idefics_80b() -> None:
    """accelerate estimate-memory idefics-80b: 297.12 GiB in fp32, 1.16 TiB with Adam.

    The parameter count is not derived (a vision tower, a resampler and gated cross-attention, which the plan refuses):
    it is taken from the first figure, and the second one follows.
    """
    params = round(297.12 * GIB / 4)
    assert sum(zero_3(params, 1).values()) * 16 / 18 / TIB == pytest.approx(1.16, abs=0.005)
    with pytest.raises(UsageError, match="not modelled"):
        shape_of_config({"model_type": "idefics"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookbook:
    """One example of EleutherAI's transformer memory calculator, and what it prints: GiB per GPU."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    micro: int = 1
    tensor: int = 1
    gpus: int = 1
    ffn_factor: float = 4.0
    selective: bool = True
    printed: tuple[float, ...]

    @property
    def num_params(self) -> float:
        """With two embeddings and without biases: 8h of norms a layer, 4h² of attention, two matrices of the MLP."""
        hidden, layers = self.hidden, self.layers
        ends = 2 * 51200 * hidden + hidden * self.sequence + 2 * hidden
        return ends + layers * (8 * hidden + 4 * hidden**2 + 2 * self.ffn_factor * hidden**2)


COOKBOOK = {
    "pythia-6.9b": Cookbook(
        layers=32, hidden=4096, heads=32, micro=8, tensor=2, gpus=128,
        printed=(34.00, 6.40, 25.60, 0.60, 0.93, 67.53),
    ),
    "pythia-12b": Cookbook(
        layers=36, hidden=5120, heads=40, micro=8, tensor=4, gpus=256,
        printed=(23.91, 5.52, 44.19, 0.52, 0.93, 75.06),
    ),
    "20b": Cookbook(layers=44, hidden=6144, heads=64, printed=(17.53, 38.32, 76.65, 229.95, 0, 362.45)),
    "llama-7b-like": Cookbook(
        layers=32, hidden=4096, heads=32, sequence=4096, ffn_factor=3.5, selective=False,
        printed=(97.00, 11.81, 23.63, 70.89, 0, 203.33),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", COOKBOOK.values(), ids=COOKBOOK)
def test_cookbook_calculator(row: Cookbook) -> None:
    """EleutherAI/cookbook calc_transformer_mem.py: activations, weights, gradients, optimizer, communication, total.

    Its conventions: "checkpointed" activations are those of selective recomputation with everything over the tensor
    ranks (34sbh/t); fp32 gradients are divided by nothing; the optimizer by all GPUs, not by the replicas; a bucket
    of 5e8 two-byte numbers.
    """
    params = row.num_params
    layer = korthikanti_layer_bytes(
        hidden=row.hidden, heads=row.heads, sequence=row.sequence, micro=row.micro, tensor=row.tensor,
        sharded_norms=True, selective=row.selective,
    )  # fmt: skip
    terms = [
        row.layers * layer / GIB,
        2 * params / row.tensor / GIB,
        4 * params / GIB,
        12 * params / row.gpus / GIB,
        2 * 5e8 / GIB if row.gpus > 1 else 0,
    ]
    assert [*terms, sum(terms)] == pytest.approx(row.printed, abs=0.006)


def test_where_the_cookbook_and_this_plan_part() -> None:
    """pythia-6.9B over 2 × 64 GPUs: ours divides gradients by the tensor ranks and the optimizer by the 64 replicas.

    The activations agree: our upper bound of a selectively recomputed GPT with sequence parallelism is 34sbh/t per
    layer and the norms' and the fused kernel's statistics.
    """
    row = COOKBOOK["pythia-6.9b"]
    shape = gpt(num_layers=32, hidden_size=4096, num_heads=32, vocab_size=51200, max_positions=2048)
    request = MemoryRequest(
        shape=shape,
        precision=Precision.BF16_MASTER_FP32_GRADS,
        layout=Layout(mesh=Mesh(num_ranks=128, num_tensor=2), zero_stage=1, is_sequence_parallel=True),
        batch=Microbatch(num_sequences=8, sequence_length=2048),
        activations=Activations(recompute=Recompute.SELECTIVE),
    )
    plan = plan_memory(request)
    untied = 2 * 51200 * 4096 / 2  # its second embedding, which a tied head does not have
    optimizer = plan.term("fp32 master weights").lower_bytes + plan.term("optimizer moments").lower_bytes
    assert plan.term("gradients").lower_bytes / GIB == pytest.approx(
        (row.printed[2] - 2 * untied * 2 / GIB) / 2, rel=0.01
    )
    assert optimizer / plan.term("gradients").lower_bytes == pytest.approx(12 / 4 / 64, rel=0.001)
    statistics = 4 * 32 / 2 + 16 / 2
    upper = layer_bounds(request).upper
    assert upper == pytest.approx(row.printed[0] * GIB / 32 + statistics * 8 * 2048, rel=1e-6)


ART = {  # OpenPipe/ART#915, Qwen3.8-27B on H200, GiB: earlier estimate, estimate, observed
    "TP4, 2k pair": (32.974, 22.854, 20.550),
    "TP4, 4k pair": (56.075, 38.789, 35.077),
    "TP4, 8k pair": (112.151, 77.273, 69.926),
    "TP8, 19,221 + 19,222": (153.866, 126.188, 114.665),
}


@pytest.mark.parametrize(("earlier", "estimated", "observed"), ART.values(), ids=ART)
def test_art_measured_against_planned(earlier: float, estimated: float, observed: float) -> None:
    """OpenPipe/ART#915: a component model of retained activations is 10 to 13 % over what was seen, never under.

    These rows cannot be derived: the model mixes gated delta-net layers, which this plan refuses, with attention; the
    pairs share a prefix, and only two of the packed token counts are published. What they set is the target that our
    own comparisons with measurements are held to: at most 15 % over, never under.
    """
    assert 1.09 < estimated / observed < 1.13
    assert earlier / observed > 1.3
    with pytest.raises(UsageError, match="not modelled"):
        shape_of_config({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]})


@pytest.mark.parametrize(
    ("tensor", "tokens", "observed"), [(4, 6_964, 35.077), (8, 32_710, 114.665)], ids=["4k pair", "19,221 + 19,222"]
)
def test_art_attempt_with_attention_in_every_layer(tensor: int, tokens: int, observed: float) -> None:
    """The rows with published tokens (ART#913, #922), bounded as if all 64 layers of width 5120 had attention.

    Feed-forward 17,408 and 24 heads of 256, 4 for keys and values, are recalled, not published in these threads, so
    this shows that the size is right and no more: layers alone are 4 and 21 % over, never under; the second row misses
    the 15 % that a plan of the true architecture must keep.
    """
    config = {
        "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    }  # fmt: skip
    request = MemoryRequest(
        shape=shape_of_config(config),
        layout=Layout(mesh=Mesh(num_ranks=tensor, num_tensor=tensor), is_sequence_parallel=True),
        batch=Microbatch(sequence_length=tokens),
    )
    dense = layer_bounds(request).times(64 / GIB)
    assert dense.lower < observed <= dense.upper < 1.21 * observed
