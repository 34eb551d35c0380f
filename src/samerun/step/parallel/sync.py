"""When replicas exchange gradients: once a window under DDP, per microbatch or once under FSDP2.

Also what DDP needs before the first window of every attempt. DDP re-orders its gradient buckets after its first
backward, so without it the first update after a resume sums in another order than the twin's: equal on two ranks,
not on three or four. A throw-away backward through every parameter settles the order before training starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from samerun.core.choice import Choice
from samerun.errors import UsageError


class Accumulate(Choice):
    """How FSDP2 accumulates over a window's microbatches."""

    SHARDED = "sharded"
    """Reduce each microbatch; memory stays that of one shard."""
    UNSHARDED = "unsharded"
    """One reduction per window; every rank holds full gradients until then."""


class GradientSync:
    """`at_step`: DDP's replicas exchange gradients when an optimizer steps, one reduction a dtype, not in a backward.

    With several optimizers a backward may run through the others' models, and float32 sums of 16-bit gradients exist
    only apart from `.grad`.
    """

    def __init__(self, models: Mapping[str, nn.Module], accumulate: Accumulate, *, at_step: bool = False) -> None:
        self._ddp = [model for model in models.values() if isinstance(model, DistributedDataParallel)]
        self._fsdp = [model for model in models.values() if isinstance(model, FSDPModule)]
        self._accumulate = accumulate
        self.at_step = at_step
        if at_step and self._fsdp and accumulate is Accumulate.UNSHARDED:
            raise UsageError(
                "accumulate='unsharded' serves one optimizer and parameters in full precision; use 'sharded'"
            )

    @property
    def forwards_must_match(self) -> bool:
        """Whether every rank must run as many forwards as its peers, or all of them hang."""
        return bool(self._fsdp)

    @property
    def reduces_last_backward(self) -> bool:
        """Whether the last backward replaces this rank's own gradient by the mean over replicas."""
        return bool(self._ddp) and not self.at_step

    @property
    def reduces_every_backward(self) -> bool:
        """Whether each backward adds the mean over replicas to this rank's shards."""
        return bool(self._fsdp) and self._accumulate is Accumulate.SHARDED

    def before_forward(self, *, last: bool) -> None:
        """Set before the forward: DDP decides there whether the coming backward reduces."""
        for model in self._ddp:
            model.require_backward_grad_sync = last and not self.at_step
        if self._accumulate is Accumulate.UNSHARDED:
            for sharded in self._fsdp:
                sharded.set_requires_gradient_sync(last)
        for sharded in self._fsdp:
            sharded.set_is_last_backward(last)

    def before_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """The mean over replicas of one optimizer's gradients, where no backward took it: one reduction a dtype.

        Collective; every rank must have gradients for the same parameters.
        """
        if not (self.at_step and self._ddp):
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for gradient in gradients:
            by_dtype[gradient.dtype].append(gradient)
        for tensors in by_dtype.values():
            flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(dist.get_world_size())
            dist.all_reduce(flat)
            for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

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
