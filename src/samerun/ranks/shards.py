"""FSDP2 modules hold their shards whenever parameters are looked at from outside a forward or backward.

A forward without gradients (an evaluation, a check of shapes) leaves the parameters of the outermost module whole until
the next backward. What a module then calls its parameters are copies: a save would describe them instead of the shards,
a restore into them would be lost, an optimizer's parameters would belong to no model, and an update of the shards would
leave the next forward with the values of before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sharded_modules(models: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]


def hold_shards(modules: Sequence[FSDPModule]) -> None:
    """Gives whole copies back where there are any. Local; changes no value, and costs the next forward a gather."""
    for module in modules:
        module.reshard()
