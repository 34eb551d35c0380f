"""Names of parameters and buffers that do not depend on how the model is wrapped.

DDP adds `module.`, `torch.compile` adds `_orig_mod.`, activation-checkpoint wrappers add `_checkpoint_wrapped_module.`;
a checkpoint with or without them must be the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samerun.ranks.shards import hold_shards, sharded_modules

_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP and `torch.compile`."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Every distinct parameter by its first clean name, sharded ones as shards; several models prefix with `name/`."""
    hold_shards(sharded_modules(models.values()))
    return {
        _prefix(models, key) + clean(name): parameter
        for key, model in models.items()
        for name, parameter in unwrap(model).named_parameters()
    }


def aliases(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Second names of tied parameters → the name under which they are stored."""
    first: dict[int, str] = {}
    result: dict[str, str] = {}
    for key, model in models.items():
        for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
            full = _prefix(models, key) + clean(name)
            if id(parameter) in first:
                result[full] = first[id(parameter)]
            else:
                first[id(parameter)] = full
    return result


def buffers(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Every distinct buffer by its clean name, persistent or not: whatever a forward may change is state."""
    return {
        _prefix(models, key) + clean(name): buffer
        for key, model in models.items()
        for name, buffer in unwrap(model).named_buffers()
    }


def _prefix(models: Mapping[str, nn.Module], key: str) -> str:
    return "" if len(models) == 1 else f"{key}/"
