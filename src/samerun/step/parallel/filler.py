"""Forwards without data, for sharded models whose forwards must match on every rank.

When D does not divide the microbatches some ranks have one fewer. Under FSDP2 they would leave the others waiting in
an all-gather, so the window itself repeats the rank's last forward with zero output gradients; the user's loop never
sees it. Random streams and buffers are put back by the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class ForwardRecorder:
    """Remembers the arguments of the models' forwards between `start` and `stop`."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = list(models.values())
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        self._calls.clear()
        if not self._handles:
            self._handles = [
                model.register_forward_pre_hook(self._record, with_kwargs=True, prepend=True) for model in self._models
            ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        self.stop()
        self._calls.clear()

    def replay(self) -> None:
        """The recorded forwards once more, and one backward of zeros through all their outputs."""
        outputs = list(self._outputs())
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._calls.append((module, args, kwargs))

    def _outputs(self) -> Iterator[torch.Tensor]:
        for model, args, kwargs in self._calls:
            for leaf in tree_leaves(model(*args, **kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    yield leaf
