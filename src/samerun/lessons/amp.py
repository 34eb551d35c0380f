"""Lesson: a safe step in mixed precision. Norm, clip and judgement are those of `samerun.step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from samerun.errors import UsageError
from samerun.step.engine import clip_factor
from samerun.step.loop import Step
from samerun.step.parallel.gradients import gradients_of, multiply, squared_norm
from samerun.step.precision import Precision
from samerun.step.skip_rate import WINDOW, SkipRate

DEFAULT_MAX_NORM: Final = 1.0

_PRECISIONS: Final = {
    torch.float16: Precision.FP16,
    torch.bfloat16: Precision.BF16,
    torch.float32: Precision.FP32,
}


def clip_global_l2_norm(parameters: Iterable[nn.Parameter], max_norm: float = DEFAULT_MAX_NORM) -> tuple[float, float]:
    """Scales the gradients of `parameters` in place to a global L2 norm of at most `max_norm`; returns (before, after).

    The same gradients as `torch.nn.utils.clip_grad_norm_`: g·min(1, max_norm / (norm + 1e-6)). Plain and sharded
    (DTensor) gradients may be mixed; collective over the meshes of sharded ones. A norm that is not finite is returned
    as it is and the gradients are left alone: check `has_non_finite_grad` first, and unscale before both. Raises
    UsageError for a `max_norm` that is not positive.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm={max_norm} must be positive, like {DEFAULT_MAX_NORM}")
    gradients = gradients_of(parameters)
    norm = _norm(gradients)
    factor = clip_factor(norm, max_norm)
    multiply(gradients, factor)
    return norm, norm * factor


def has_non_finite_grad(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any gradient holds Inf or NaN, or the gradients' float32 norm overflows, so that no clip could help.

    One copy to the host for all gradients together. Collective over the meshes of sharded gradients.
    """
    return not math.isfinite(_norm(gradients_of(parameters)))


def _norm(gradients: list[torch.Tensor]) -> float:
    device = gradients[0].device if gradients else torch.device("cpu")
    return math.sqrt(float(squared_norm(gradients, device)))


class Skippable(Protocol):
    """One row of a log that says whether its step was skipped."""

    @property
    def skipped(self) -> bool: ...


def rolling_skip_rate(log: Iterable[Skippable | bool], window: int = WINDOW) -> list[float]:
    """After each row of `log`: the share of skipped steps among the last `window` rows up to it, or all there are.

    Rows are `StepLog`s, or just whether a step was skipped. Alert above 5 %: see `samerun.step.SkipRate`, which does.
    Raises UsageError for a `window` below 1.
    """
    if window < 1:
        raise UsageError(f"window={window} must be at least 1, like {WINDOW}")
    rate, rates = SkipRate(window), []
    for row in log:
        rate.after(skipped=row if isinstance(row, bool) else row.skipped)
        rates.append(rate.value)
    return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One attempted step."""

    step: int
    """Its number, from 0; skipped ones count."""
    loss: float
    """NaN when it was not finite."""
    skipped: bool
    skip_reason: str
    """`non_finite_loss`, `non_finite_grad`, or empty."""
    grad_l2_pre_clip: float
    """Of the unscaled gradient; NaN when skipped."""
    grad_l2_post_clip: float
    lr: float
    scale: float
    """The loss scale during the step; 1 where none is used."""

    @property
    def tag(self) -> str:
        return "SKIP" if self.skipped else "STEP"


class AmpTrainState:
    """A model, its AdamW and its loss scale, stepped safely: autocast, check, unscale, check, clip, step.

    `amp_dtype`: float16 with a loss scale on cuda, bfloat16 without one elsewhere, unless said otherwise (float32: no
    autocast). `device_type` need not be given; when it is, it must be where the parameters are, since an autocast for
    another device does nothing. `loss_fn(outputs, targets)` gives a mean over the batch; outputs arrive in float32.

    Guarantee: a skipped step changes no parameter, moment or buffer; a bad loss leaves the loss scale alone, a bad
    gradient halves it. Ends at what it does not own: the data, the random streams, the checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,
        max_norm: float = DEFAULT_MAX_NORM,
        device_type: str | None = None,
        weight_decay: float = 0.01,
        amp_dtype: torch.dtype | None = None,
        *,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.mse_loss,
    ) -> None:
        if not max_norm > 0:
            raise UsageError(f"max_norm={max_norm} must be positive, like {DEFAULT_MAX_NORM}")
        device = next(model.parameters()).device.type
        if device_type not in (None, device):
            raise UsageError(
                f"device_type={device_type!r}, but the parameters are on {device!r}: the autocast would do nothing; "
                f"move the model first, or leave device_type out"
            )
        dtype = amp_dtype or (torch.float16 if device == "cuda" else torch.bfloat16)
        if dtype not in _PRECISIONS:
            known = ", ".join(str(each) for each in _PRECISIONS)
            raise UsageError(f"amp_dtype={dtype} is no precision of a forward; choose one of {known}")
        self.model = model
        self.amp_dtype = dtype
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
        self.log: list[StepLog] = []
        self._loss_fn = loss_fn
        self._step = Step(model, self.optimizer, precision=_PRECISIONS[dtype], max_norm=max_norm)

    @property
    def skip_count(self) -> int:
        return int(self._step.progress.skipped)

    @property
    def alerts(self) -> list[str]:
        """One sentence for each time more than 5 % of the last 1000 steps had been skipped."""
        return self._step.alerts

    def step(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        gradient_corruptor: Callable[[nn.Module], None] | None = None,
    ) -> StepLog:
        """One attempted step on one batch. `gradient_corruptor` may spoil the scaled gradients, to see them skipped."""
        window = self._step.window([(inputs, targets)], num_samples=[len(inputs)])
        for batch, expected in window:
            loss = self._loss_fn(self.model(batch).float(), expected)
            window.backward(mean=loss, weight=len(batch))
        if gradient_corruptor is not None:
            gradient_corruptor(self.model)
        outcome = window.step()
        row = StepLog(
            step=len(self.log),
            loss=outcome.loss,
            skipped=not outcome.updated,
            skip_reason="" if outcome.updated else outcome.reason.value,
            grad_l2_pre_clip=outcome.grad_norm,
            grad_l2_post_clip=outcome.grad_norm_clipped,
            lr=outcome.lr,
            scale=outcome.scale,
        )
        self.log.append(row)
        return row
