"""What a forward changes besides gradients: buffers, copied at the edge and put back when a window leaves no trace.

BatchNorm's statistics become infinite by a forward that is later skipped, and stay so (DESIGN §9.2). Copies are kept by
module and key, not by tensor: a module may put a new tensor in a buffer's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn


class KeptBuffers:
    """A copy of every buffer of the models, persistent or not, as of construction."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._kept = [
            (owner, key, buffer.detach().clone())
            for model in models.values()
            for owner, key, buffer in _buffers_of(model)
        ]

    def put_back(self) -> None:
        """Into the buffers that still have this shape; another one was only just made by the forward."""
        with torch.no_grad():
            for owner, key, kept in self._kept:
                live = owner._buffers.get(key)
                if live is not None and live.shape == kept.shape:
                    live.copy_(kept)


def _buffers_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each buffer once with its owner. `named_buffers()` spends most of its time on names, in every window."""
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        waiting.extend(child for child in module._modules.values() if child is not None)
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield module, key, buffer
