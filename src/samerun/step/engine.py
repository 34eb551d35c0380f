"""The safe update, once, in one readable place.

    backward of every microbatch            collectives match on all ranks, also where a loss is bad
    unscale                                 fp16 only
    norm                                    one reduction when sharded
    agree                                   one SUM over all ranks, one copy to the host
    a bad loss anywhere      →  drop the gradients, leave the scaler alone            non_finite_loss
    a bad gradient anywhere  →  drop the gradients, scaler.update() halves the scale  non_finite_grad
    no weight anywhere       →  drop the gradients, leave the scaler alone            no_weight
    otherwise                →  gradients of the token mean, clip, optimizer.step, scaler.update

With D replicas whose averaged gradients are g = (1/D)·Σ∇(loss_sum), the gradient of the mean over N tokens is g·D/N.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from samerun.ranks.topology import Topology
from samerun.step.outcome import Outcome, Reason
from samerun.step.parallel.agree import Agreed, Local, Share, agree
from samerun.step.parallel.gradients import gradients_of, multiply, squared_norm
from samerun.step.parallel.sync import Accumulate, GradientSync
from samerun.step.precision import LossScale, Precision

_CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_'s: keeps the same clipped values as that function."""


class Engine:
    """What stays from window to window: optimizer, scaler, precision, synchronisation."""

    def __init__(
        self,
        *,
        models: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        topology: Topology,
        precision: Precision,
        max_norm: float | None,
        accumulate: Accumulate,
    ) -> None:
        self.models = models
        self.topology = topology
        self.precision = precision
        self.sync = GradientSync(models, accumulate)
        self.device = _device_of(optimizer)
        self.loss_scale = LossScale(precision, self.device)
        self._optimizer = optimizer
        self._max_norm = max_norm

    def trained(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def decide(self, share: Share) -> tuple[Outcome, Agreed]:
        """Judges the window with all ranks and updates or skips. Collective."""
        lr = float(self._optimizer.param_groups[0]["lr"])
        gradients = gradients_of(self.trained())
        if gradients:
            self.loss_scale.unscale(self._optimizer)
        local = Local(squared_norm=squared_norm(gradients, self.device), scale=self.loss_scale.on_device(self.device))
        agreed = agree(share, local, leads=self.topology.leads, device=self.device)
        reason = judge(agreed)
        factor = self._objective_factor(agreed)
        norm = math.sqrt(agreed.squared_norm) * factor if reason is Reason.UPDATED else math.nan
        clip = self._clip_factor(norm)
        if reason is Reason.UPDATED:
            multiply(gradients, factor * clip)
            self._optimizer.step()
        if reason in (Reason.UPDATED, Reason.NON_FINITE_GRAD) and gradients:
            self.loss_scale.update()
        else:
            self.loss_scale.drop()
        self.loss_scale.expect_weight(agreed.weight / self.topology.num_replicas)
        self.drop_gradients()
        bad = agreed.num_bad_losses > 0 or agreed.weight == 0
        return Outcome(
            reason=reason,
            loss=math.nan if bad else agreed.loss_sum / agreed.weight,
            grad_norm=norm,
            grad_norm_clipped=norm * clip,
            weight=agreed.weight,
            lr=lr,
            scale=agreed.scale,
        ), agreed

    def _objective_factor(self, agreed: Agreed) -> float:
        if agreed.weight <= 0:
            return 0.0
        return self.topology.num_replicas / agreed.weight * 2.0**self.loss_scale.shift

    def _clip_factor(self, norm: float) -> float:
        if self._max_norm is None or not math.isfinite(norm):
            return 1.0
        return min(1.0, self._max_norm / (norm + _CLIP_EPSILON))


def judge(agreed: Agreed) -> Reason:
    """What becomes of the window; pure, so every rank decides alike."""
    if agreed.num_bad_losses:
        return Reason.NON_FINITE_LOSS
    if agreed.num_bad_norms:
        return Reason.NON_FINITE_GRAD
    if agreed.weight <= 0:
        return Reason.NO_WEIGHT
    return Reason.UPDATED


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    assert isinstance(device, torch.device)
    return device
