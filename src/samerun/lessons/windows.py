"""Lesson: accumulate, and let replicas exchange gradients once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from samerun.errors import UsageError
from samerun.step.parallel.sync import Accumulate, GradientSync


def loss_scaled_for_accum(
    logits: torch.Tensor,
    target: torch.Tensor,
    accum_steps: int,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`loss_fn(logits, target) / accum_steps`: backward of `accum_steps` such losses leaves the mean's gradient.

    That is the mean over the whole batch only where all microbatches count alike. With 7, 1, 3 and 5 tokens it gives
    the lone token seven times the weight; `window.backward(loss_sum, weight)` of `samerun.step` does not. Raises
    UsageError for `accum_steps` below 1.
    """
    if accum_steps < 1:
        raise UsageError(f"accum_steps={accum_steps} must be at least 1: the number of microbatches in an update")
    return loss_fn(logits, target) / accum_steps


@contextlib.contextmanager
def no_sync_context(model: nn.Module) -> Iterator[None]:
    """Gradients of backwards inside stay with this rank; the next backward outside exchanges the sum. DDP and FSDP2.

    The *forward* must be inside as well: DDP decides there. Under FSDP2 full gradients stay resident until the
    exchange, and every rank must run as many forwards as its peers. Any other model: nothing to do.
    """
    sync = GradientSync({"model": model}, Accumulate.UNSHARDED)
    sync.before_forward(last=False)
    try:
        yield
    finally:
        sync.reset()
