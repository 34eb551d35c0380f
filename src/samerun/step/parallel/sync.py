"""When replicas exchange gradients: once a window under DDP, per microbatch or once under FSDP2.

Also what DDP needs before the first window of every attempt. DDP re-orders its gradient buckets after its first
backward, so without it the first update after a resume sums in another order than the twin's: equal on two ranks,
not on three or four. A throw-away backward through every parameter settles the order before training starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from samerun.errors import UsageError


class Accumulate(Enum):
    """How FSDP2 accumulates over a window's microbatches."""

    SHARDED = "sharded"
    """Reduce each microbatch; memory stays that of one shard."""
    UNSHARDED = "unsharded"
    """One reduction per window; every rank holds full gradients until then."""

    @classmethod
    def parse(cls, text: str | Accumulate) -> Accumulate:
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"accumulate={text!r} is unknown; choose 'sharded' or 'unsharded'") from None


class GradientSync:
    def __init__(self, models: Mapping[str, nn.Module], accumulate: Accumulate) -> None:
        self._ddp = [model for model in models.values() if isinstance(model, DistributedDataParallel)]
        self._fsdp = [model for model in models.values() if isinstance(model, FSDPModule)]
        self._accumulate = accumulate

    @property
    def forwards_must_match(self) -> bool:
        """Whether every rank must run as many forwards as its peers, or all of them hang."""
        return bool(self._fsdp)

    def before_forward(self, *, last: bool) -> None:
        """Set before the forward: DDP decides there whether the coming backward reduces."""
        for model in self._ddp:
            model.require_backward_grad_sync = last
        if self._accumulate is Accumulate.UNSHARDED:
            for sharded in self._fsdp:
                sharded.set_requires_gradient_sync(last)
        for sharded in self._fsdp:
            sharded.set_is_last_backward(last)

    def reset(self) -> None:
        self.before_forward(last=True)


def settle_bucket_order(models: Mapping[str, nn.Module]) -> None:
    """One throw-away backward through each DDP model; parameters, buffers and gradients are left as they were."""
    for model in models.values():
        if isinstance(model, DistributedDataParallel):
            _settle(model)


def _settle(model: DistributedDataParallel) -> None:
    inner = model.module
    model.require_forward_param_sync = False  # no buffer broadcast; the backward sets it again
    model.module = _Touch(inner)
    try:
        model().backward()
    finally:
        model.module = inner
    for parameter in model.parameters():
        parameter.grad = None


class _Touch(nn.Module):
    """Stands in for the user's module for one call, so that none of its code, hooks or random draws run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum() * 0.0 for parameter in self._trained]).sum()
