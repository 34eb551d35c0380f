"""The safe update, once, in one readable place.

    backward of every microbatch            collectives match on all ranks, also where a loss is bad
    unscale                                 fp16 only
    norm                                    one reduction when sharded
    agree                                   one SUM over all ranks, one copy to the host
    a bad loss anywhere      →  drop the gradients, leave the scaler alone            non_finite_loss
    a bad gradient anywhere  →  drop the gradients, scaler.update() halves the scale  non_finite_grad
    no weight anywhere       →  drop the gradients, leave the scaler alone            no_weight
    otherwise                →  gradients of the token mean, clip, fence, optimizer.step, scaler.update

With D replicas whose averaged gradients are g = (1/D)·Σ∇(loss_sum), the gradient of the mean over N tokens is g·D/N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from samerun.errors import UsageError, WindowError
from samerun.ranks.topology import Topology
from samerun.step.noise import NoiseProbe
from samerun.step.options import StepOptions
from samerun.step.outcome import Outcome, Reason
from samerun.step.parallel.agree import Agreed, Local, Share, agree, sum_over_ranks
from samerun.step.parallel.gradients import HALF, SinglePrecisionSums, multiply, squared_norm
from samerun.step.parallel.sync import GradientSync
from samerun.step.precision import LossScale, Precision

_CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_'s: keeps the same clipped values as that function."""

BeforeUpdate = Callable[[Agreed], float]
"""Called between the agreement and the step of a window that updates: sets the learning rate, returns the first one."""


class Engine:
    """What stays from window to window: optimizers, loss scales, synchronisation."""

    def __init__(
        self,
        *,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        topology: Topology,
        options: StepOptions,
        before_update: Mapping[str, BeforeUpdate] | None = None,
    ) -> None:
        self.models = models
        self.topology = topology
        self.options = options
        self.device = _device_of(optimizers)
        has_sums = any(p.dtype in HALF for o in optimizers.values() for g in o.param_groups for p in g["params"])
        # what accumulates apart from `.grad`, or for one optimizer only, cannot be exchanged by DDP's last backward
        at_step = has_sums or len(optimizers) > 1
        self.sync = GradientSync(models, options.accumulate, at_step=at_step)
        self.noise = None if options.noise_every is None else NoiseProbe(options.noise_every, self.sync, topology)
        self.fence: Callable[[], None] = _nothing
        """Returns once nobody reads what an update is about to change: a save may still be copying it."""
        hooks = before_update or {}
        self.updaters = {
            name: Updater(self, optimizer, before_update=hooks.get(name)) for name, optimizer in optimizers.items()
        }

    def updater(self, of: str | None) -> tuple[str, Updater]:
        """By name; the name may be left out when there is one. Raises UsageError."""
        if of is None and len(self.updaters) == 1:
            of = next(iter(self.updaters))
        if of not in self.updaters:
            got = "without a name" if of is None else f"for {of!r}"
            raise UsageError(f"this run has the optimizers {sorted(self.updaters)}, got a call {got}; name one of them")
        return of, self.updaters[of]

    def require_even(self, *, is_even: bool) -> None:
        """Before a window: raises UsageError where replicas with fewer microbatches could not keep their peers company.

        With several optimizers a batch has several backwards, and which forward belongs to which cannot be repeated.
        """
        if not is_even and self.sync.forwards_must_match and len(self.updaters) > 1:
            raise UsageError(
                "with several optimizers under FSDP2 every replica needs as many microbatches as its peers: choose a "
                "global batch that is a multiple of micro_batch · replicas"
            )

    def drop_gradients(self) -> None:
        for updater in self.updaters.values():
            updater.drop_gradients()

    def scaler_state(self) -> dict[str, object]:
        """The loss scales: of the one optimizer, or by name."""
        states = {name: updater.loss_scale.state_dict() for name, updater in self.updaters.items()}
        return dict(states) if len(states) > 1 else next(iter(states.values()))

    def load_scaler_state(self, state: dict[str, object]) -> None:
        for name, updater in self.updaters.items():
            mine = state if len(self.updaters) == 1 else state.get(name)
            if not isinstance(mine, dict):
                raise UsageError(f"the checkpoint holds no loss scale for the optimizer {name!r}")
            updater.loss_scale.load_state_dict(mine)


class Updater:
    """One optimizer: judges its gradients with all ranks, then steps or skips."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, *, before_update: BeforeUpdate | None) -> None:
        self.loss_scale = LossScale(engine.options.precision, engine.device)
        self._engine = engine
        self._optimizer = optimizer
        self._before_update = before_update
        self._sums = SinglePrecisionSums(self.trained)
        if engine.options.precision is Precision.FP16 and any(p.dtype in HALF for p in self.trained):
            raise UsageError(
                "precision='fp16' keeps parameters in fp32 and runs the forward in fp16; these parameters are 16 bits "
                "wide themselves, so small updates would vanish: leave out model.half() or .bfloat16()"
            )

    @property
    def trained(self) -> list[nn.Parameter]:
        """Read anew in every window: a script may add groups as it goes."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def drop_gradients(self) -> None:
        trained = self.trained
        if not self._sums.are_of(trained):
            self._sums = SinglePrecisionSums(trained)
        self._sums.drop()
        for parameter in trained:  # what zero_grad does, less its profiling, which costs as much as a small kernel
            parameter.grad = None

    def after_backward(self) -> None:
        """Takes the gradients of 16-bit parameters over into their float32 sums."""
        self._sums.take()

    def expect(self, weight: torch.Tensor | float, num_batches: int) -> None:
        """Before the run's first scaled loss: all ranks choose the loss scale's shift from what they are about to see.

        Collective in that one moment only.
        """
        if self.loss_scale.shift is not None:
            return
        mine = self._engine.topology.counts_tokens * num_batches
        total = sum_over_ranks(torch.as_tensor(weight, device=self._engine.device).detach().double() * mine)
        self.loss_scale.start(total / self._engine.topology.num_averaged)

    def decide(self, share: Share) -> tuple[Outcome, Agreed]:
        """Judges the window with all ranks and updates or skips. Collective."""
        device, replicas, trained = self._engine.device, self._engine.topology.num_averaged, self.trained
        if not self._sums.are_of(trained):
            raise WindowError("the optimizer's parameters changed inside a window; change them between two windows")
        gradients = self._engine.sync.before_step(trained, self._sums.gradients())
        self.loss_scale.unscale(self._optimizer)
        scale, norm_squared = self.loss_scale.on_device(), squared_norm(list(gradients.values()), device)
        local = Local(squared_norm=norm_squared, scale=scale, lr=self._lr_on_device())
        agreed = agree(share, local, topology=self._engine.topology, device=device)
        reason = judge(agreed)
        factor = replicas / agreed.weight * 2.0**self._shift if agreed.weight > 0 else 0.0
        norm = math.sqrt(agreed.squared_norm) * factor if reason is Reason.UPDATED else math.nan
        clip = clip_factor(norm, self._engine.options.max_norm)
        lr = agreed.lr
        self._engine.fence()
        if reason is Reason.UPDATED:
            lr = self._before_update(agreed) if self._before_update is not None else lr
            multiply(list(gradients.values()), factor * clip)
            self._sums.hand_back(gradients)
            self._optimizer.step()
        judged_gradients = reason in (Reason.UPDATED, Reason.NON_FINITE_GRAD)
        overflowed = reason is Reason.NON_FINITE_GRAD if judged_gradients else None
        self.loss_scale.settle(self._optimizer, overflowed=overflowed)
        outcome = self._outcome(reason, agreed, norm=norm, clip=clip, lr=lr)
        if self._engine.noise is not None:
            self._engine.noise.decided(outcome, agreed.noise, backward_scale=agreed.scale * 2.0**-self._shift)
        self.loss_scale.expect_weight(agreed.weight / replicas)
        self.drop_gradients()
        return outcome, agreed

    @property
    def _shift(self) -> int:
        return self.loss_scale.shift or 0

    def _outcome(self, reason: Reason, agreed: Agreed, *, norm: float, clip: float, lr: float | None) -> Outcome:
        bad = agreed.num_bad_ranks > 0 or agreed.weight <= 0
        return Outcome(
            reason=reason,
            loss=math.nan if bad else agreed.loss_sum / agreed.weight,
            grad_norm=norm,
            grad_norm_clipped=norm * clip,
            weight=agreed.weight,
            lr=float(self._optimizer.param_groups[0]["lr"]) if lr is None else lr,
            scale=agreed.scale,
        )

    def _lr_on_device(self) -> torch.Tensor | None:
        lr = self._optimizer.param_groups[0]["lr"]
        return lr.detach().to(self._engine.device, torch.float64).reshape(()) if isinstance(lr, torch.Tensor) else None


def judge(agreed: Agreed) -> Reason:
    """What becomes of the window; pure, so every rank decides alike."""
    if agreed.num_bad_ranks:
        return Reason.NON_FINITE_LOSS
    if agreed.num_bad_norms:
        return Reason.NON_FINITE_GRAD
    if agreed.weight <= 0:
        return Reason.NO_WEIGHT
    return Reason.UPDATED


def clip_factor(norm: float, max_norm: float | None) -> float:
    """min(1, max_norm / (norm + 1e-6)); 1 without a limit or a finite norm."""
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + _CLIP_EPSILON))


def _nothing() -> None:
    """No save runs beside these updates."""


def _device_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> torch.device:
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    device = next(parameter.device for group in groups for parameter in group["params"])
    assert isinstance(device, torch.device)
    return device
