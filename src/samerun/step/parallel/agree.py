"""What the ranks tell each other at a window's end: one SUM, and one copy from the device to the host.

Everything is a count or a sum in float64, exact for integers up to 2^53; the 64-bit coverage digest travels as two
halves. Bad losses are zeroed before the sum, since one NaN would poison it for everybody.
"""

from __future__ import annotations

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


class Tally:
    """One optimizer's losses and weights of this rank's part of a window, summed once at its end, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | float] = []

    def add(self, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        self._losses.append(loss.detach().to(self._device, torch.float64))
        self._weights.append(weight.detach().reshape(()) if isinstance(weight, torch.Tensor) else float(weight))

    def sums(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(weight, loss, number of bad ones), float64, 0-dim.

        A bad number is left out, since one NaN would poison the sum for everybody, and its batch counts as bad. The
        weight of a bad loss still counts: its tokens were consumed.
        """
        if not self._losses:
            zeros = torch.zeros(3, dtype=torch.float64, device=self._device)
            return zeros[0], zeros[1], zeros[2]
        losses, weights = torch.stack(self._losses), self._stacked_weights()
        usable = torch.stack([torch.isfinite(weights) & (weights >= 0), torch.isfinite(losses)])
        kept = torch.where(usable, torch.stack([weights, losses]), 0.0).sum(dim=1)
        return kept[0], kept[1], (~usable.all(dim=0)).sum().to(torch.float64)

    def _stacked_weights(self) -> torch.Tensor:
        on_host = [weight for weight in self._weights if not isinstance(weight, torch.Tensor)]
        if len(on_host) == len(self._weights):
            return torch.tensor(on_host, dtype=torch.float64).to(self._device, non_blocking=True)
        return torch.stack(
            [torch.as_tensor(w, dtype=torch.float64).to(self._device, torch.float64) for w in self._weights]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a window. Tensors are float64, 0-dim, on the device."""

    weight: torch.Tensor
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
    noise: tuple[float, ...]


def agree(share: Share, local: Local, *, topology: Topology, device: torch.device) -> Agreed:
    """Collective over all ranks.

    A rank that does not lead its replica adds flags but no samples, and no tokens unless they are its own part of an
    example: its leader adds them.
    """
    leads = topology.leads
    counts = [
        share.num_samples if leads else 0,
        share.coverage % _HALF if leads else 0,
        share.coverage // _HALF if leads else 0,
        *(int(getattr(share.flags, field.name)) for field in fields(Flags)),
    ]
    bad_norm = (~torch.isfinite(local.squared_norm)).to(torch.float64)
    zeros = torch.zeros(_NUM_NOISE, dtype=torch.float64, device=device)
    noise = share.noise if share.noise is not None else zeros
    sums = torch.cat([torch.stack([share.weight, share.loss_sum]), noise])
    vector = torch.cat(
        [
            sums if topology.counts_tokens else torch.zeros_like(sums),
            torch.stack([share.num_bad_losses, bad_norm]),
            torch.tensor(counts, dtype=torch.float64).to(device, non_blocking=True),
        ]
    )
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(vector)
    lr = local.lr if local.lr is not None else zeros[0]
    values = torch.cat([vector, torch.stack([local.squared_norm, local.scale, lr])]).tolist()
    weight, loss_sum, *noise_sums, bad_losses, bad_norms, samples, low, high, stop, abandon, save_due = values[:-3]
    squared_norm, scale, read_lr = values[-3:]
    return Agreed(
        weight=weight,
        loss_sum=loss_sum,
        num_bad_losses=int(bad_losses),
        num_bad_norms=int(bad_norms),
        squared_norm=squared_norm,
        scale=scale,
        lr=read_lr if local.lr is not None else None,
        num_samples=int(samples),
        coverage=(int(low) + int(high) * _HALF) % (_HALF * _HALF),
        num_stop=int(stop),
        num_abandon=int(abandon),
        num_save_due=int(save_due),
        noise=tuple(noise_sums),
    )


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
