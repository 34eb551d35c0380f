"""What the ranks tell each other at a window's end: one SUM, and one copy from the device to the host.

Everything is a count or a sum in float64, exact for integers up to 2^53; the 64-bit coverage digest travels as two
halves. Bad losses are zeroed before the sum, since one NaN would poison it for everybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

import torch
import torch.distributed as dist

from samerun.ranks.topology import Topology

_HALF: Final = 1 << 32
_NUM_NOISE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What one rank has to say besides its numbers."""

    stop: bool = False
    """A stop was noticed: finish this window, save, leave."""
    abandon: bool = False
    """This rank must not save any more: its launcher died, or a newer attempt exists."""
    save_due: bool = False
    """The time for a periodic save has come by this rank's clock; only one rank's clock is asked."""
    save_over: bool = False
    """The save in flight has come to its end on this rank, whatever it is."""
    save_failed: bool = False
    """It has failed."""


_FLAGS: Final = tuple(field.name for field in fields(Flags))


class _Scalars:
    """0-dim values copied side by side, float64, as they come.

    Kept as they are, each would hold a few bytes between the activations of one microbatch and the next, and the
    allocator could not use that room again as one piece: peak memory grew with the number of microbatches.
    """

    _AT_ONCE: Final = 64

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [self._piece()]
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, value: torch.Tensor | float) -> None:
        place = self._num % self._AT_ONCE
        if self._num and place == 0:
            self._pieces.append(self._piece())
        self._pieces[-1][place] = value
        self._num += 1

    def stacked(self) -> torch.Tensor:
        return torch.cat(self._pieces)[: self._num] if len(self._pieces) > 1 else self._pieces[0][: self._num]

    def _piece(self) -> torch.Tensor:
        return torch.empty(self._AT_ONCE, dtype=torch.float64, device=self._device)


class Tally:
    """One optimizer's losses and weights of this rank's part of a window, summed once at its end, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._losses = _Scalars(device)
        self._weights = _Scalars(device)
        """Empty while all came as numbers of the host, which were checked when they came."""
        self._on_host: list[float] = []

    def add(self, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        self._losses.add(loss.detach())
        if not isinstance(weight, torch.Tensor) and not len(self._weights):
            self._on_host.append(float(weight))
            return
        for earlier in self._on_host:
            self._weights.add(earlier)
        self._on_host.clear()
        self._weights.add(weight.detach().reshape(()) if isinstance(weight, torch.Tensor) else float(weight))

    def sums(self) -> tuple[torch.Tensor | float, torch.Tensor, torch.Tensor]:
        """(weight, loss, number of bad ones), float64, 0-dim; a weight that is known here stays on the host.

        A bad number is left out, since one NaN would poison the sum for everybody, and its batch counts as bad. The
        weight of a bad loss still counts: its tokens were consumed.
        """
        losses = self._losses.stacked()
        loss = torch.nan_to_num(losses, nan=0.0, posinf=0.0, neginf=0.0).sum()
        is_bad = (losses - losses) != 0  # NaN unless finite; a third of the kernels of isfinite
        weight: torch.Tensor | float = math.fsum(self._on_host)
        if len(self._weights):
            weights = self._weights.stacked()
            is_countable = torch.isfinite(weights) & (weights >= 0)
            weight = torch.where(is_countable, weights, 0.0).sum()
            is_bad |= ~is_countable
        return weight, loss, is_bad.sum(dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a window. Tensors are float64, 0-dim, on the device."""

    weight: torch.Tensor | float
    loss_sum: torch.Tensor
    num_bad_losses: torch.Tensor
    num_samples: int
    coverage: int
    flags: Flags
    noise: torch.Tensor | None = None
    """Where gradient noise is measured: Σ|g_k|², Σ 1/n_k, number of microbatches k; g_k with loss scale and shift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What every rank knows alike already and only has to leave the device in the same copy: float64, 0-dim."""

    squared_norm: torch.Tensor
    scale: torch.Tensor
    lr: torch.Tensor | None = None
    """Only where the learning rate lives on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The sums over all ranks: the same values on every rank."""

    weight: float
    loss_sum: float
    num_bad_losses: int
    num_bad_norms: int
    squared_norm: float
    scale: float
    lr: float | None
    num_samples: int
    coverage: int
    num_stop: int
    num_abandon: int
    num_save_due: int
    num_save_over: int
    num_save_failed: int
    noise: tuple[float, ...]


def agree(share: Share, local: Local, *, topology: Topology, device: torch.device) -> Agreed:
    """Collective over all ranks.

    A rank that does not lead its replica adds flags but no samples, and no tokens unless they are its own part of an
    example: its leader adds them.
    """
    leads, counts, alone = topology.leads, topology.counts_tokens, topology.world_size == 1
    noise = share.noise.unbind() if share.noise is not None else (0.0,) * _NUM_NOISE
    numbers: list[torch.Tensor | float] = [
        share.weight if counts else 0.0,
        share.loss_sum if counts else 0.0,
        *(noise if counts else (0.0,) * _NUM_NOISE),
        share.num_bad_losses,
        0.0 if alone else (~torch.isfinite(local.squared_norm)).to(torch.float64),
        float(share.num_samples if leads else 0),
        float(share.coverage % _HALF if leads else 0),
        float(share.coverage // _HALF if leads else 0),
        *(float(getattr(share.flags, name)) for name in _FLAGS),
    ]
    known = [local.squared_norm, local.scale, *([] if local.lr is None else [local.lr])]
    values = _sum_and_read(numbers, known, alone=alone, device=device)
    squared_norm, scale, *lr = values[len(numbers) :]
    first_flag = len(numbers) - len(_FLAGS)
    flags = dict(zip(_FLAGS, values[first_flag : len(numbers)], strict=True))
    weight, loss_sum, *noise_sums, bad_losses, bad_norms, samples, low, high = values[:first_flag]
    return Agreed(
        weight=weight,
        loss_sum=loss_sum,
        num_bad_losses=int(bad_losses),
        num_bad_norms=int(bad_norms) or int(not math.isfinite(squared_norm)),
        squared_norm=squared_norm,
        scale=scale,
        lr=lr[0] if lr else None,
        num_samples=int(samples),
        coverage=(int(low) + int(high) * _HALF) % (_HALF * _HALF),
        **{f"num_{name}": int(count) for name, count in flags.items()},
        noise=tuple(noise_sums),
    )


def _sum_and_read(
    numbers: list[torch.Tensor | float], known: list[torch.Tensor], *, alone: bool, device: torch.device
) -> list[float]:
    """`numbers` summed over all ranks, then `known` as it is, in one copy to the host.

    Alone, what the host knows already stays there; among several ranks a number that one of them has on the host
    another may have on its device.
    """
    on_device = [number for number in numbers if isinstance(number, torch.Tensor)]
    if alone:
        read = iter(torch.stack([*on_device, *known]).tolist())
        return [next(read) if isinstance(number, torch.Tensor) else number for number in numbers] + list(read)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    host = [0.0 if isinstance(number, torch.Tensor) else number for number in numbers]
    vector = torch.stack([number if isinstance(number, torch.Tensor) else zero for number in numbers])
    vector += torch.tensor(host, dtype=torch.float64).to(device, non_blocking=True)
    dist.all_reduce(vector)
    values: list[float] = torch.cat([vector, torch.stack(known)]).tolist()
    return values


def sum_over_ranks(value: torch.Tensor) -> float:
    """A float64 0-dim tensor summed over all ranks. Collective, and one copy to the host: for once-a-run questions."""
    total = value.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def max_over_ranks(value: int, device: torch.device) -> int:
    """Collective, and one copy to the host."""
    largest = torch.tensor(value, device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
