"""Precision of the forward, and the loss scaler where fp16 needs one.

The scaler is torch's own. Two things are added: resetting it when a window is dropped before `update()` (a bad loss
must leave scale and growth untouched), and `shift`, a power of two that keeps summed fp16 losses from acting as an
extra loss scale: the sum is divided by 2^shift inside backward and put right with the objective's own factor.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from samerun.core.choice import Choice
from samerun.errors import UsageError


class Precision(Choice):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    MODEL = "model"
    """The model has a mixed-precision policy of its own."""

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A fresh autocast context for the device the optimizer works on."""
        if self is Precision.BF16:
            return torch.autocast(device.type, dtype=torch.bfloat16)
        if self is Precision.FP16:
            return torch.autocast(device.type, dtype=torch.float16)
        return contextlib.nullcontext()


class Autocast:
    """One window's: entered for each batch, left before its backward; both may be called with nothing to do.

    Left open across a step it would serve cached copies of weights that have changed (DESIGN §9.7).
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._context = precision.autocast(device)
        self._is_open = False

    def open(self) -> None:
        if not self._is_open:
            self._context.__enter__()
            self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._context.__exit__(None, None, None)


class LossScale:
    """The GradScaler of one optimizer, or nothing at all for precisions that need none."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type) if precision is Precision.FP16 else None
        self._device = device
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self.shift: int | None = 0 if self._scaler is None else None
        """None until the run's first loss: nothing is known about weights before."""
        if self._scaler is not None:
            # torch makes the scale at the first scaled loss; a resumed scale must exist before that
            self._scaler._lazy_init_scale_growth_tracker(device)

    @property
    def enabled(self) -> bool:
        return self._scaler is not None

    def on_device(self) -> torch.Tensor:
        """The current loss scale, float64, 0-dim, on the device: reading it here costs no synchronisation."""
        live = self._scaler._get_scale_async() if self._scaler is not None else None
        return self._one if live is None else live.double()

    def scaled(self, loss_sum: torch.Tensor) -> torch.Tensor:
        if self._scaler is None:
            return loss_sum
        assert self.shift is not None
        # in float32 first: a half loss would see the bare scale, 65,536, as its gradient, which is infinite in fp16
        wide = loss_sum.float() if loss_sum.dtype in (torch.float16, torch.bfloat16) else loss_sum
        scaled = self._scaler.scale(wide * 2.0**-self.shift)
        assert isinstance(scaled, torch.Tensor)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def settle(self, optimizer: torch.optim.Optimizer, *, overflowed: bool | None) -> None:
        """The window's end. True halves the scale, False lets it grow in time, None leaves scale and growth alone.

        What torch's own check found on this rank is overruled by what all ranks agreed: scales must never differ.
        """
        if self._scaler is None:
            return
        if overflowed is not None:
            found = torch.full((), float(overflowed), device=self._device)
            self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {self._device: found}
            self._scaler.update()
        self._scaler._per_optimizer_states.clear()

    def start(self, weight_per_replica: float) -> None:
        """Chooses the first shift of a run, from what the first losses say about its window."""
        self.shift = 0
        if math.isfinite(weight_per_replica):
            self.expect_weight(weight_per_replica)

    def expect_weight(self, weight_per_replica: float) -> None:
        """Chooses the shift for windows of about this agreed weight; a power of two changes no rounding.

        Rounded up: the shifted sum is never larger than the mean, and at least half of it.
        """
        if self._scaler is not None and weight_per_replica > 0:
            self.shift = max(0, math.ceil(math.log2(weight_per_replica)))

    def state_dict(self) -> dict[str, Any]:
        if self._scaler is None:
            return {}
        return {**self._scaler.state_dict(), "shift": self.shift}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler is None:
            if state:
                raise UsageError(
                    "the checkpoint holds a loss scale, but this precision uses none; say precision='fp16'"
                )
            return
        if not state:
            raise UsageError("precision='fp16' needs a loss scale, and the checkpoint was saved without one")
        state = dict(state)
        shift = state.pop("shift")
        self.shift = None if shift is None else int(shift)
        self._scaler.load_state_dict(state)
