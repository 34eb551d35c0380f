"""What a memory plan is asked about: the model, the method, the numbers' formats, the layout and one microbatch.

Bytes per parameter, by `Precision` (weight / gradient / fp32 master / one Adam moment):

    fp32                      4 / 4 / 0 / 4     = 16 with Adam's two moments
    bf16, fp16 (autocast)     4 / 4 / 0 / 4     = 16; the weights stay fp32, the cast copies are a term of their own
    bf16-master               2 / 2 / 4 / 4     = 16   ZeRO (arXiv 1910.02054 §3.1), DeepSpeed
    bf16-master-fp32-grads    2 / 4 / 4 / 4     = 18   Megatron-LM without the distributed optimizer
    bf16-pure                 2 / 2 / 0 / 2     = 8    moments take the weights' type
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from samerun.core.units import Size
from samerun.errors import UsageError
from samerun.plan import checks
from samerun.plan.mesh import Mesh
from samerun.plan.model.shape import Shape, check_params


class Method(Enum):
    """Which weights train: all, adapters, or adapters on a 4-bit base."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Precision(Enum):
    """How weights, gradients and moments are stored; the bytes of each are in NUMBER_BYTES."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_MASTER = "bf16-master"
    BF16_MASTER_FP32_GRADS = "bf16-master-fp32-grads"
    BF16_PURE = "bf16-pure"


class Optimizer(Enum):
    """What the optimizer keeps for a parameter: nothing, one moment, two, or two of one byte."""

    SGD = "sgd"
    MOMENTUM = "sgd-momentum"
    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"


class Quantization(Enum):
    """How the frozen base of QLoRA is stored: bits per weight plus the block constants."""

    IDEAL_4BIT = "4bit"
    NF4 = "nf4"
    NF4_DOUBLE = "nf4-double"


class Attention(Enum):
    """FLASH is any fused kernel that keeps no s² scores; MATH keeps them."""

    FLASH = "flash"
    MATH = "math"


class Recompute(Enum):
    """What the backward recomputes: nothing, the attention core, each block, segments of k layers, √L segments."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    EVERY_K = "every-k"
    SQRT = "sqrt"


class Loss(Enum):
    """EAGER cross-entropy keeps the logits; FUSED computes them in chunks and keeps none."""

    EAGER = "eager"
    FUSED = "fused"


class Save(Enum):
    """How a checkpoint leaves the device: written in place, staged and written behind, or gathered on one rank."""

    BLOCKING = "blocking"
    ASYNC = "async"
    FULL_GATHER = "full-gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberBytes:
    """Bytes of one number of each kind under a precision."""

    weight: int
    grad: int
    master: int
    moment: int
    activation: int


NUMBER_BYTES: Final[dict[Precision, NumberBytes]] = {
    Precision.FP32: NumberBytes(weight=4, grad=4, master=0, moment=4, activation=4),
    Precision.BF16: NumberBytes(weight=4, grad=4, master=0, moment=4, activation=2),
    Precision.FP16: NumberBytes(weight=4, grad=4, master=0, moment=4, activation=2),
    Precision.BF16_MASTER: NumberBytes(weight=2, grad=2, master=4, moment=4, activation=2),
    Precision.BF16_MASTER_FP32_GRADS: NumberBytes(weight=2, grad=4, master=4, moment=4, activation=2),
    Precision.BF16_PURE: NumberBytes(weight=2, grad=2, master=0, moment=2, activation=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The mesh and what is sharded over its replicas: ZeRO stage 0–3 (3 is FSDP), sequence-parallel norms or not."""

    mesh: Mesh = field(default_factory=Mesh)
    zero_stage: int = 0
    is_sequence_parallel: bool = False
    num_interleaved: int = 1
    """Virtual stages on each pipeline rank (1F1B interleaving)."""
    is_unsharded_accumulation: bool = False
    """One reduction per window: full gradients stay resident (FSDP with gradient sync off)."""

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise UsageError(f"ZeRO stage {self.zero_stage} does not exist; write --zero 0, 1, 2 or 3 (3 is FSDP)")
        if self.is_sequence_parallel and self.mesh.num_tensor == 1:
            raise UsageError("sequence parallelism shards over the tensor ranks; give --tp 2 or more, or drop --sp")
        checks.whole("num_interleaved", self.num_interleaved, "2")
        if self.num_interleaved > 1 and self.mesh.num_pipeline == 1:
            raise UsageError("interleaving needs pipeline stages; give --pp 2 or more, or drop --interleave")

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of what ZeRO shards: D · CP (context ranks hold the same weights)."""
        return self.mesh.num_replicas * self.mesh.num_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What one rank pushes through at once, and how many make a window. Raises UsageError for non-positive sizes."""

    num_sequences: int = 1
    sequence_length: int = 0
    """In tokens; 0 when not given: activations are then unknown."""
    num_accumulated: int = 1

    def __post_init__(self) -> None:
        checks.whole("micro batch", self.num_sequences, "--micro 2")
        checks.not_negative("sequence length", self.sequence_length, "--seq 4096")
        checks.whole("accumulation", self.num_accumulated, "--accumulate 8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank adapters: rank, and whether every linear layer has one or only those of the attention."""

    rank: int = 16
    is_attention_only: bool = False

    def __post_init__(self) -> None:
        checks.whole("adapter rank", self.rank, "--rank 16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """How activations are kept: attention backend, recompute mode, loss."""

    attention: Attention = Attention.FLASH
    recompute: Recompute = Recompute.NONE
    segment_layers: int = 4
    """Layers in a segment under `every-k`."""
    loss: Loss = Loss.EAGER

    def __post_init__(self) -> None:
        checks.whole("layers in a segment", self.segment_layers, "--recompute every-4")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """One question about memory. `num_params` or `shape` must be given; with both they must agree within 5 %."""

    num_params: int | None = None
    shape: Shape | None = None
    method: Method = Method.FULL
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    quantization: Quantization = Quantization.IDEAL_4BIT
    adapter: Adapter = field(default_factory=Adapter)
    layout: Layout = field(default_factory=Layout)
    batch: Microbatch = field(default_factory=Microbatch)
    activations: Activations = field(default_factory=Activations)
    save: Save = Save.ASYNC
    device: Size | None = None
    """What the process may use of one device: capacity less what others hold."""
    reserve_bytes: int = 2 * 2**30
    """Upper bound for what no tensor accounts for: CUDA context, communication buffers, fragmentation."""

    def __post_init__(self) -> None:
        if self.shape is None and self.num_params is None:
            raise UsageError("nothing to plan: give --params 70e9, or --config config.json, or a shape (--layers …)")
        if self.num_params is not None:
            checks.whole("number of parameters", self.num_params, "--params 70e9")
        if self.shape is not None and self.num_params is not None:
            check_params(self.shape, self.num_params)
        if self.device is not None:
            checks.positive("device size in bytes", self.device.num_bytes, "--device 24GiB")
        if self.method is Method.QLORA and self.precision in (
            Precision.BF16_MASTER, Precision.BF16_MASTER_FP32_GRADS
        ):  # fmt: skip
            raise UsageError("QLoRA has no fp32 master of its 4-bit base; write --precision bf16 or bf16-pure")
        self._check_layout()

    def _check_layout(self) -> None:
        shape, mesh = self.shape, self.layout.mesh
        if shape is None:
            return
        checks.divides("tensor parallelism", mesh.num_tensor, "num_heads", shape.num_heads)
        checks.divides("tensor parallelism", mesh.num_tensor, "ffn_size", shape.ffn_size)
        if mesh.num_pipeline * self.layout.num_interleaved > shape.num_layers:
            raise UsageError(
                f"{mesh.num_pipeline} pipeline stages × {self.layout.num_interleaved} need at least that many layers; "
                f"the model has {shape.num_layers}: write --pp {min(mesh.num_pipeline, shape.num_layers)}"
            )
        length = self.batch.sequence_length
        if length and length % mesh.num_context:
            checks.divides("context parallelism", mesh.num_context, "sequence length", length)
        if shape.max_positions and length > shape.max_positions:
            raise UsageError(
                f"sequence length {length} is longer than the model's {shape.max_positions} positions; "
                f"write --seq {shape.max_positions}"
            )

    @property
    def num_base_params(self) -> int:
        """Of the whole model, without adapters."""
        if self.shape is not None:
            return self.shape.num_params
        assert self.num_params is not None
        return self.num_params
