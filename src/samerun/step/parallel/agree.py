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
        self._pieces: list[torch.Tensor] = []
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, value: torch.Tensor | float) -> None:
        place = self._num % self._AT_ONCE
        if place == 0:
            self._pieces.append(self._piece())
        self._pieces[-1][place] = value
        self._num += 1

    def stacked(self) -> torch.Tensor:
        pieces = self._pieces or [self._piece()]
        return (torch.cat(pieces) if len(pieces) > 1 else pieces[0])[: self._num]

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

    def sums(self) -> Sums:
        losses = self._losses.stacked()
        if not len(self._weights):
            return Sums(weight=math.fsum(self._on_host), loss=losses.sum(), least_weight=0.0)
        weights = self._weights.stacked()
        return Sums(weight=weights.sum(), loss=losses.sum(), least_weight=weights.min())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Of this rank's part of a window, float64, 0-dim; weights that are known on the host stay there.

    Not finite where a number was not: few kernels, and judged once, where it is known whether peers must be spared it.
    """

    weight: torch.Tensor | float
    loss: torch.Tensor
    least_weight: torch.Tensor | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a window. Tensors are float64, 0-dim, on the device."""

    sums: Sums
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
    """Of the ranks without a bad one."""
    num_bad_ranks: int
    """Which had a loss or a weight that is no finite number."""
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
    example: its leader adds them. A rank with a loss or a weight that is no finite number adds no loss, one with such a
    weight, or one below 0, no weight; the weight of a bad loss counts, since its tokens were consumed.
    """
    leads, counts, alone = topology.leads, topology.counts_tokens, topology.world_size == 1
    weight, loss, bad = _as_they_are(share.sums) if alone else _without_bad(share.sums)
    noise = share.noise.unbind() if share.noise is not None else (0.0,) * _NUM_NOISE
    numbers: list[torch.Tensor | float] = [
        weight if counts else 0.0,
        loss if counts else 0.0,
        *(noise if counts else (0.0,) * _NUM_NOISE),
        bad,
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
    tokens, loss_sum, *noise_sums, bad_ranks, bad_norms, samples, low, high = values[:first_flag]
    if alone:
        tokens, loss_sum, bad_ranks = _judged(tokens, loss_sum, least_weight=bad_ranks)
    return Agreed(
        weight=tokens,
        loss_sum=loss_sum,
        num_bad_ranks=int(bad_ranks),
        num_bad_norms=int(bad_norms) or int(not math.isfinite(squared_norm)),
        squared_norm=squared_norm,
        scale=scale,
        lr=lr[0] if lr else None,
        num_samples=int(samples),
        coverage=(int(low) + int(high) * _HALF) % (_HALF * _HALF),
        **{f"num_{name}": int(count) for name, count in flags.items()},
        noise=tuple(noise_sums),
    )


_Number = torch.Tensor | float


def _as_they_are(sums: Sums) -> tuple[_Number, _Number, _Number]:
    """Weight, loss, least weight: where nobody else hears them, they are judged when the host has them."""
    return sums.weight, sums.loss, sums.least_weight


def _judged(weight: float, loss: float, *, least_weight: float) -> tuple[float, float, float]:
    """Weight, loss, and 1 if one of them is bad, on the host."""
    has_weight = math.isfinite(weight) and least_weight >= 0
    is_bad = not (has_weight and math.isfinite(loss))
    return weight if has_weight else 0.0, 0.0 if is_bad else loss, float(is_bad)


def _without_bad(sums: Sums) -> tuple[_Number, _Number, _Number]:
    """The same on the device, where one NaN would poison the sum for everybody."""
    has_loss = torch.isfinite(sums.loss)
    if not isinstance(sums.weight, torch.Tensor):
        return sums.weight, torch.where(has_loss, sums.loss, 0.0), (~has_loss).to(torch.float64)
    has_weight = torch.isfinite(sums.weight) & (torch.as_tensor(sums.least_weight) >= 0)
    is_good = has_loss & has_weight
    return torch.where(has_weight, sums.weight, 0.0), torch.where(is_good, sums.loss, 0.0), (~is_good).to(torch.float64)


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
