"""When replicas exchange gradients: once a window under DDP, per microbatch or once under FSDP2.

Also what DDP needs before the first window of every attempt. DDP re-orders its gradient buckets after its first
backward, so without it the first update after a resume sums in another order than the twin's: equal on two ranks,
not on three or four. A throw-away backward through every parameter settles the order before training starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from samerun.core.choice import Choice
from samerun.errors import UsageError
from samerun.ranks.shards import hold_shards, sharded_modules
from samerun.ranks.topology import uncompiled
from samerun.step.parallel.gradients import HALF


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
        bare = [uncompiled(model) for model in models.values()]
        self._ddp = [model for model in bare if isinstance(model, DistributedDataParallel)]
        self._fsdp = [sharded for model in bare for sharded in _outermost_sharded(model)]
        self._shards = sharded_modules(bare)
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

    def before_forward(self, *, last: bool, first: bool = False) -> None:
        """Set before the forward: DDP decides there whether the coming backward reduces."""
        for model in self._ddp:
            model.require_backward_grad_sync = last and not self.at_step
            if first and self.at_step:  # else a forward whose backward reduced has set it
                model.require_forward_param_sync = True
        if self._accumulate is Accumulate.UNSHARDED:
            for sharded in self._fsdp:
                sharded.set_requires_gradient_sync(last)
        for sharded in self._fsdp:
            sharded.set_is_last_backward(last)

    def before_step(
        self, parameters: Sequence[nn.Parameter], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """The mean over replicas of one optimizer's gradients, where no backward took it: one reduction a dtype.

        Collective. A parameter that only other replicas used gets their gradient, one that nobody used none, as in DDP.
        """
        hold_shards(self._shards)  # a forward without gradients may have come since the last backward
        if not (self.at_step and self._ddp):
            return dict(gradients)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            if parameter.requires_grad:
                by_dtype[torch.float32 if parameter.dtype in HALF else parameter.dtype].append(parameter)
        means: dict[nn.Parameter, torch.Tensor] = {}
        for dtype, chosen in by_dtype.items():
            means |= _mean_over_replicas(chosen, gradients, dtype, self._ddp[0].process_group)
        return means

    def reset(self) -> None:
        self.before_forward(last=True)


def _outermost_sharded(model: nn.Module) -> Iterator[FSDPModule]:
    """The model itself, or what of it `fully_shard` was applied to (its blocks only, or what torch.compile wraps)."""
    if isinstance(model, FSDPModule):
        yield model
        return
    for child in model.children():
        yield from _outermost_sharded(child)


def _mean_over_replicas(
    parameters: Sequence[nn.Parameter],
    gradients: Mapping[nn.Parameter, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> dict[nn.Parameter, torch.Tensor]:
    """Every rank sends all parameters, zeros where it has no gradient, and which ones it had."""
    parts = [
        gradients[p].flatten() if p in gradients else torch.zeros(p.numel(), dtype=dtype, device=p.device)
        for p in parameters
    ]
    had = torch.tensor([float(p in gradients) for p in parameters], dtype=dtype).to(parts[0].device, non_blocking=True)
    flat = torch.cat([*parts, had]).div_(dist.get_world_size(group))
    dist.all_reduce(flat, group=group)
    *received, had = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
    # read only where something is missing: elsewhere it is known, and reading would wait for the device
    anyone_had = [True] * len(parts) if all(p in gradients for p in parameters) else (had != 0).tolist()
    means: dict[nn.Parameter, torch.Tensor] = {}
    for parameter, part, exists in zip(parameters, received, anyone_had, strict=True):
        if parameter in gradients:
            means[parameter] = gradients[parameter].copy_(part.view_as(gradients[parameter]))
        elif exists:
            means[parameter] = part.view(parameter.shape).clone()
            if parameter.dtype not in HALF:
                parameter.grad = means[parameter]
    return means


def settle_bucket_order(models: Mapping[str, nn.Module]) -> None:
    """One throw-away backward through each DDP model; parameters, buffers and gradients are left as they were."""
    for model in map(uncompiled, models.values()):
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
        real = (torch.view_as_real(p) if p.is_complex() else p for p in self._trained)
        return torch.stack([numbers.sum() * 0.0 for numbers in real]).sum()
