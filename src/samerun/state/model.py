"""Components `weights` and `buffers`: what the model holds.

Tied parameters are stored once and their other names recorded; frozen ones are stored like the rest. Buffers are each
rank's own (BatchNorm statistics differ between ranks between two DDP broadcasts), so no rank gets another's copy; on
another number of ranks all get rank 0's, as DDP's next broadcast would have it.
"""

from __future__ import annotations

from collections.abc import Mapping

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
