"""The gradients of one window as one vector, however they are sharded: norm, factor, clearing.

Plain and DTensor gradients of different meshes are normed apart and joined by their squares; torch's own clipping
raises on such a mixture. Sharded squares are summed over exactly those mesh dimensions that shard the tensor, so
replicas count once and the norm does not depend on the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

HALF: Final = (torch.bfloat16, torch.float16)


class SinglePrecisionSums:
    """Keeps the accumulated gradients of 16-bit parameters in float32: in bfloat16, 256 + 1 is 256.

    Each backward's gradient is added and taken away from the parameter; `hand_back` gives it the whole, rounded once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._all = [id(p) for p in parameters]
        self._parameters = [p for p in parameters if p.dtype in HALF]
        self._others = [p for p in parameters if p.dtype not in HALF]
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def take(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            sofar = self._sums.get(parameter)
            added = parameter.grad.detach().float()
            self._sums[parameter] = added if sofar is None else sofar.add_(added)
            parameter.grad = None

    def gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """All gradients of this window: the sums, and those of parameters in full precision.

        In the parameters' order, not that of their first gradient, which may differ between ranks.
        """
        sums = {parameter: self._sums[parameter] for parameter in self._parameters if parameter in self._sums}
        return sums | {parameter: parameter.grad for parameter in self._others if parameter.grad is not None}

    def hand_back(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Gives the 16-bit parameters theirs of `gradients`, rounded once."""
        for parameter in self._parameters:
            if parameter in gradients:
                parameter.grad = gradients[parameter].to(parameter.dtype)

    def drop(self) -> None:
        self._sums.clear()

    def are_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are the parameters whose gradients are kept here."""
        return self._all == [id(parameter) for parameter in parameters]


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Squared global L2 norm, float64, 0-dim, on the device. Collective over the meshes of sharded gradients.

    Squares are summed in float32 per tensor (float64 for float64 gradients) and in float64 across tensors. A gradient
    whose float32 norm overflows counts as not finite. No host synchronisation.
    """
    plain: list[torch.Tensor] = []
    sharded: dict[tuple[DeviceMesh, tuple[int, ...]], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            plain.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
            continue
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            gradient = gradient.redistribute(
                placements=[Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
            )
        dims = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
        sharded[(gradient.device_mesh, dims)].append(gradient.to_local())
    total = _local_squares(plain, device) if plain or not sharded else None
    for (mesh, dims), local in sharded.items():
        squares = _local_squares(local, device)
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total = squares if total is None else total + squares
    assert total is not None
    return total


def multiply(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """gradients *= factor, in place; exact when the factor is a power of two."""
    local = [_values(gradient) for gradient in gradients]
    if local and factor != 1.0:
        torch._foreach_mul_(local, factor)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers that this rank holds of it, to be changed in place."""
    if isinstance(gradient, DTensor):
        return gradient.to_local()
    return gradient._values() if gradient.is_sparse else gradient


def _local_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    by_precision: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            by_precision[torch.float64 if real.dtype == torch.float64 else torch.float32].append(real)
    norms = [
        torch.stack(torch._foreach_norm(chosen, 2, dtype=precision)).to(device, torch.float64)
        for precision, chosen in by_precision.items()
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).square().sum()
