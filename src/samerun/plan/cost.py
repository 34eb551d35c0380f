"""What a run costs: FLOPs, days, money.

    C = 6·N·D                         Kaplan et al. (arXiv 2001.08361 §2.1): forward 2ND, backward 4ND
    72·B·L·s·h²·(1 + s/6h + V/12hL)   one update of a GPT, its shape given: Narayanan et al. (arXiv 2104.04473 §5.1)
    recompute                         full: 4 units instead of 3; selective: s/6h becomes s/3h (arXiv 2205.05198)
    days                              C / (devices · FLOP/s · MFU) / 86,400

MFU is model FLOPs utilization: useful FLOPs over the peak. What devices really execute (HFU) includes
recomputation, so at the same hardware speed recomputing costs time, not MFU's numerator. 6ND leaves attention's s²
term and the vocabulary out; the shape puts them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from samerun.errors import UsageError
from samerun.plan import checks

SECONDS_PER_DAY: Final = 86_400.0

KNOWN_DEVICES: Final[dict[str, float]] = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "v100": 125e12,
    "t4": 65e12,
}
"""Dense 16-bit peak FLOP/s from the vendors' data sheets (SXM parts)."""


class Recomputing(Enum):
    """What is recomputed in the backward, for its FLOPs alone."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRequest:
    """Parameters, tokens, and what they run on."""

    num_params: int
    num_tokens: int
    num_devices: int = 1
    peak_flops_per_second: float = KNOWN_DEVICES["a100"]
    """Of one device."""
    utilization: float = 0.4
    """MFU: the share of the peak that is model FLOPs."""
    recomputing: Recomputing = Recomputing.NONE
    price_per_device_hour: float | None = None
    goodput: float = 1.0
    """Share of the wall clock that is kept work."""

    def __post_init__(self) -> None:
        checks.whole("number of parameters", self.num_params, "--params 125e6")
        checks.whole("number of tokens", self.num_tokens, "--tokens 300e9")
        checks.whole("number of devices", self.num_devices, "--devices 64")
        checks.positive("peak FLOP/s of a device", self.peak_flops_per_second, "--device a100 or --peak 312e12")
        for name, value in (("MFU", self.utilization), ("goodput", self.goodput)):
            if not 0 < value <= 1:
                raise UsageError(
                    f"{name} must be above 0 and at most 1, got {value:g}; write it like --{name.lower()} 0.4"
                )
        if self.price_per_device_hour is not None:
            checks.not_negative("price of a device hour", self.price_per_device_hour, "--price 2.50")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPlan:
    """FLOPs, time and money of one run."""

    SCHEMA: ClassVar[str] = "samerun.plan.cost.v1"

    request: CostRequest
    model_flops: float
    """6ND."""
    hardware_flops: float
    """With recomputation."""
    tokens_per_second: float
    """While training, without the goodput."""
    seconds: float
    """Of wall clock, recomputation and goodput included."""
    device_hours: float
    price: float | None
    tokens_per_param: float
    """About 20 is the compute-optimal ratio of Hoffmann et al. (arXiv 2203.15556)."""


def training_flops(num_params: float, num_tokens: float) -> float:
    """C = 6ND."""
    return 6 * num_params * num_tokens


def full_recompute_factor() -> float:
    """A step of forward 1 and backward 2 units runs the forward twice: 4 units instead of 3."""
    return 4 / 3


def update_flops(
    *, num_layers: int, hidden: int, sequence: int, vocab: int, num_sequences: int,
    recomputing: Recomputing = Recomputing.NONE,
) -> float:  # fmt: skip
    """Model FLOPs of one update of a GPT (hardware FLOPs when something is recomputed)."""
    attention = sequence / (6 * hidden)
    base = 72 * num_sequences * num_layers * sequence * hidden**2
    head = vocab / (12 * hidden * num_layers)
    if recomputing is Recomputing.FULL:
        return base * ((1 + attention) * full_recompute_factor() + head)
    return base * (1 + attention * (2 if recomputing is Recomputing.SELECTIVE else 1) + head)


def recompute_factor(recomputing: Recomputing, *, hidden: int | None = None, sequence: int | None = None) -> float:
    """Hardware over model FLOPs of one block. Selective: 1 + s/6h; without a shape, 1.05 as a rule of thumb."""
    if recomputing is Recomputing.FULL:
        return full_recompute_factor()
    if recomputing is Recomputing.SELECTIVE:
        if hidden and sequence:
            return 1 + sequence / (6 * hidden)
        return 1.05
    return 1.0


def plan_cost(request: CostRequest) -> CostPlan:
    """FLOPs, seconds of wall clock and money. Ends at the MFU that was assumed: measure it on a few windows."""
    flops = training_flops(request.num_params, request.num_tokens)
    factor = recompute_factor(request.recomputing)
    speed = request.num_devices * request.peak_flops_per_second * request.utilization
    training_seconds = flops * factor / speed
    seconds = training_seconds / request.goodput
    hours = seconds / 3600 * request.num_devices
    price = None if request.price_per_device_hour is None else hours * request.price_per_device_hour
    return CostPlan(
        request=request,
        model_flops=flops,
        hardware_flops=flops * factor,
        tokens_per_second=request.num_tokens / training_seconds,
        seconds=seconds,
        device_hours=hours,
        price=price,
        tokens_per_param=request.num_tokens / request.num_params,
    )
