"""Components `weights` and `buffers`: what the model holds.

Tied parameters are stored once and their other names recorded; frozen ones are stored like the rest. Buffers are each
rank's own (BatchNorm statistics differ between ranks between two DDP broadcasts), so no rank gets another's copy; on
another number of ranks all get rank 0's, as DDP's next broadcast would have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samerun.core.component import Captured, Plain, Source
from samerun.errors import MismatchError
from samerun.state import names
from samerun.state.checks import require_same_names


class Weights:
    name = "weights"

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models

    def capture(self) -> Captured:
        aliases: dict[str | int, Plain] = dict(names.aliases(self._models).items())
        return Captured(
            plain={"aliases": aliases},
            tensors={name: parameter.detach() for name, parameter in names.parameters(self._models).items()},
        )

    def restore(self, source: Source) -> None:
        live = names.parameters(self._models)
        require_same_names(self.name, saved=source.specs, live=live)
        saved_aliases = source.plain["aliases"] if isinstance(source.plain, dict) else None
        if saved_aliases != names.aliases(self._models):
            raise MismatchError(
                f"weights: tied parameters differ; the checkpoint ties {saved_aliases!r}, "
                f"the program ties {names.aliases(self._models)}"
            )
        with torch.no_grad():
            for name, parameter in live.items():
                source.read_into(name, parameter.detach())


class Buffers:
    name = "buffers"

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models

    def capture(self) -> Captured:
        live = names.buffers(self._models)
        return Captured(
            tensors={name: buffer.detach() for name, buffer in live.items() if isinstance(buffer, DTensor)},
            rank_tensors={name: buffer.detach() for name, buffer in live.items() if not isinstance(buffer, DTensor)},
        )

    def restore(self, source: Source) -> None:
        live = names.buffers(self._models)
        if not set(live) <= set(source.specs):
            source = source.of_first_rank()  # another number of ranks: DDP, too, gives everybody rank 0's
        require_same_names(self.name, saved=source.specs, live=live)
        with torch.no_grad():
            for name, buffer in live.items():
                source.read_into(name, buffer.detach())


class KeptBuffers:
    """A copy of every buffer of the models, persistent or not, as of construction: what a forward may change.

    BatchNorm's statistics become infinite by a forward that is later skipped, and stay so (DESIGN §9.2). Copies are
    kept by module and key, not by tensor: a module may put a new tensor in a buffer's place, of another shape, too, or
    make one where there was none.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._kept = [
            (owner, key, None if buffer is None else buffer.detach().clone())
            for owner, key, buffer in _buffers_of(models.values())
        ]

    def put_back(self) -> None:
        """Into the tensors that are there; only where that cannot be, the copy takes their place."""
        with torch.no_grad():
            for owner, key, kept in self._kept:
                live = owner._buffers.get(key)
                if kept is None or live is None or live.shape != kept.shape or _overlaps_itself(live):
                    owner._buffers[key] = kept
                else:
                    live.copy_(kept)


def _overlaps_itself(buffer: torch.Tensor) -> bool:
    """An expanded tensor: several elements are one place in memory, so nothing can be written to it."""
    return any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))


def _buffers_of(models: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor | None]]:
    """Each buffer once with its owner. `named_buffers()` spends most of its time on names, in every window."""
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [*models]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if module._modules:
            waiting += module._modules.values()
        for key, buffer in module._buffers.items() if module._buffers else ():
            if buffer is None or id(buffer) not in seen:
                seen.add(id(buffer))
                yield module, key, buffer
