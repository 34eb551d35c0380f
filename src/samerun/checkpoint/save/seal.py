"""What proves that a copy holds the bytes of the moment at which it was ordered, although it was made later.

A tensor is sealed at the edge and its copy is judged against the seal: a write in between, by whatever means
(`.data`, NumPy, a fused optimizer), gives another seal. On the host the seal is the tensor's digest, which the index
keeps anyway. On a device it is two sums over the elements as integers, mod 2^64: the plain sum, and the sum weighted by
position, which a permutation changes; they are computed where the tensor lives, so that only sixteen bytes travel.
"""

from __future__ import annotations

from typing import Final

import torch

from samerun.checkpoint.tensors import as_carrier
from samerun.state.fingerprint import tensor_digest

_CHUNK: Final = 1 << 24
"""Elements summed at once: the weighted sum needs eight bytes for each beside the tensor."""


def is_sealed_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def seal(tensor: torch.Tensor, *, on_device: bool) -> str:
    """`on_device` is a property of the live tensor; its copy on the host must be sealed in the same way."""
    return integer_sums(tensor) if on_device else tensor_digest(tensor)


def integer_sums(tensor: torch.Tensor) -> str:
    """The two sums, whatever the device: the same bytes give the same seal."""
    carrier = as_carrier(tensor)
    if carrier.is_complex():
        carrier = torch.view_as_real(carrier).view(torch.int64)
    flat = carrier.reshape(-1)
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        totals += torch.stack([part.sum(), (part * places).sum()])
    plain, weighted = totals.tolist()
    return f"s{plain % 2**64:016x}{weighted % 2**64:016x}"
