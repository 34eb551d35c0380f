"""Objective, trainable weights, precision and distillation are separate choices; not every combination exists.

A rule is a condition, a reason and a way out. `impossible` means that no implementation can do it, or that PyTorch
refuses it; `careful` means that it runs and something has to be known. What no rule speaks about is not thereby
supported: check the architecture, the quantization backend and the adapter implementation. Sources: LoRA (arXiv
2106.09685), QLoRA (arXiv 2305.14314), Hinton et al. (arXiv 1503.02531), Kim & Rush (D16-1139),
torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final


class Objective(Enum):
    PRETRAINING = "pretraining"
    CONTINUED = "continued-pretraining"
    SFT = "sft"
    PREFERENCE = "preference"


class Trainable(Enum):
    ALL = "all"
    ADAPTERS = "adapters"


class Base(Enum):
    """How the weights are stored while training."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    NF4 = "nf4"


class Compute(Enum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Distillation(Enum):
    NONE = "none"
    SOFT_TARGETS = "soft-targets"
    SEQUENCES = "sequences"


class Teacher(Enum):
    """What is open of a teacher."""

    LOGITS_SAME_VOCABULARY = "logits"
    LOGITS_OTHER_VOCABULARY = "logits-other-vocabulary"
    TEXT_ONLY = "text"


class Device(Enum):
    CPU = "cpu"
    CUDA_WITHOUT_BF16 = "cuda-before-ampere"
    CUDA = "cuda"


class Sharding(Enum):
    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One combination of choices."""

    objective: Objective = Objective.SFT
    trainable: Trainable = Trainable.ALL
    base: Base = Base.FP32
    compute: Compute = Compute.BF16
    distillation: Distillation = Distillation.NONE
    teacher: Teacher | None = None
    device: Device = Device.CUDA
    sharding: Sharding = Sharding.NONE


class Severity(Enum):
    IMPOSSIBLE = "impossible"
    CAREFUL = "careful"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that applies: why, and what to do instead."""

    name: str
    severity: Severity
    reason: str
    instead: str


class RecipeVerdict(Enum):
    POSSIBLE = "possible"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """The combination, judged."""

    SCHEMA: ClassVar[str] = "samerun.plan.recipe.v1"

    recipe: Recipe
    verdict: RecipeVerdict
    findings: tuple[Finding, ...]


def plan_recipe(recipe: Recipe) -> RecipePlan:
    """Applies every rule; impossible ones first. Ends at the rules: silence is no promise of support."""
    found = [
        Finding(name=name, severity=severity, reason=reason, instead=instead)
        for name, severity, applies, reason, instead in _RULES
        if applies(recipe)
    ]
    found.sort(key=lambda finding: finding.severity is Severity.CAREFUL)
    is_impossible = any(finding.severity is Severity.IMPOSSIBLE for finding in found)
    verdict = RecipeVerdict.IMPOSSIBLE if is_impossible else RecipeVerdict.POSSIBLE
    return RecipePlan(recipe=recipe, verdict=verdict, findings=tuple(found))


_QUANTIZED: Final = frozenset({Base.INT8, Base.NF4})
_Applies = Callable[[Recipe], bool]
_NO, _CARE = Severity.IMPOSSIBLE, Severity.CAREFUL

_RULES: Final[tuple[tuple[str, Severity, _Applies, str, str], ...]] = (
    (
        "quantized-full", _NO, lambda r: r.trainable is Trainable.ALL and r.base in _QUANTIZED,
        "quantized weights are integers and have no gradient",
        "train adapters on them (--trainable adapters), or store the base in bf16 or fp32",
    ),
    (
        "adapters-from-scratch", _NO,
        lambda r: r.objective is Objective.PRETRAINING and r.trainable is Trainable.ADAPTERS,
        "adapters are low-rank changes of trained weights; a random base stays random",
        "--trainable all, or --objective continued-pretraining on a trained base",
    ),
    (
        "fp16-weights", _NO, lambda r: r.trainable is Trainable.ALL and r.base is Base.FP16,
        "gradients of fp16 weights are fp16: GradScaler refuses to unscale them; unscaled they underflow below 6e-8",
        "--base fp32 with --compute fp16 (autocast), or bf16",
    ),
    (
        "no-bf16-units", _NO,
        lambda r: r.device is Device.CUDA_WITHOUT_BF16 and Compute.BF16 is r.compute,
        "GPUs before Ampere have no bf16 arithmetic",
        "--compute fp16 with loss scaling, or fp32",
    ),
    (
        "other-vocabulary", _NO,
        lambda r: r.distillation is Distillation.SOFT_TARGETS and r.teacher is Teacher.LOGITS_OTHER_VOCABULARY,
        "soft targets are distributions over the teacher's tokens; another vocabulary has other tokens",
        "--distillation sequences: train on text that the teacher wrote",
    ),
    (
        "text-only-teacher", _NO,
        lambda r: r.distillation is Distillation.SOFT_TARGETS and r.teacher is Teacher.TEXT_ONLY,
        "soft targets need the teacher's logits, and only its text is open",
        "--distillation sequences",
    ),
    (
        "no-teacher", _NO,
        lambda r: r.distillation is not Distillation.NONE and r.teacher is None,
        "distillation needs a teacher",
        "--teacher logits, --teacher logits-other-vocabulary or --teacher text",
    ),
    (
        "fp16-range", _CARE, lambda r: r.compute is Compute.FP16,
        "fp16 ends at 65,504: activations of models pretrained in bf16 can overflow, and gradients need loss scaling",
        "watch the skip rate (above 5 % is an alarm), or --compute bf16",
    ),
    (
        "bf16-weights", _CARE, lambda r: r.trainable is Trainable.ALL and r.base is Base.BF16,
        "bf16 has 8 bits: an update smaller than 1/256 of a weight is rounded away",
        "--base fp32 (autocast or FSDP mixed precision), or stochastic rounding",
    ),
    (
        "sharded-nf4", _CARE, lambda r: r.base is Base.NF4 and r.sharding is Sharding.FSDP,
        "FSDP shards flat parameters of one type; packed 4-bit weights are uint8 by default",
        "bnb_4bit_quant_storage = the compute type",
    ),
    (
        "reference-model", _CARE, lambda r: r.objective is Objective.PREFERENCE and r.trainable is Trainable.ALL,
        "the reference policy is a second, frozen copy of the weights",
        "plan its memory, or train adapters: the base with them switched off is the reference",
    ),
    (
        "adapter-checkpoint", _CARE, lambda r: r.trainable is Trainable.ADAPTERS,
        "an adapter checkpoint resumes only on exactly the same frozen base and adapter configuration",
        "record the base's digest; a merged export is not resumable",
    ),
    (
        "fp32-on-tensor-cores", _CARE, lambda r: r.compute is Compute.FP32 and r.device is Device.CUDA,
        "fp32 may silently use TF32, by global setting",
        "state torch.set_float32_matmul_precision; it is part of what makes two runs the same",
    ),
)  # fmt: skip
