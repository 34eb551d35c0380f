"""What proves that a copy holds the bytes of the moment at which it was ordered, although it was made later.

A tensor is sealed at the edge and its copy is judged against the seal: a write in between, by whatever means
(`.data`, NumPy, a fused optimizer), gives another seal. On the host the seal is the tensor's digest, which the index
keeps anyway. On a device it is two sums over the elements as integers, mod 2^64: the plain sum, and the sum weighted by
position, which a permutation changes; they are computed where the tensor lives, so that only sixteen bytes travel.
"""

from __future__ import annotations

import torch

from samerun.checkpoint.tensors import as_carrier
from samerun.state.fingerprint import integer_sums, tensor_digest


def is_sealed_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def seal(tensor: torch.Tensor, *, on_device: bool) -> str:
    """`on_device` is a property of the live tensor; its copy on the host must be sealed in the same way."""
    return device_seal(tensor) if on_device else tensor_digest(tensor)


def device_seal(tensor: torch.Tensor) -> str:
    """The two sums, whatever the device: the same bytes give the same seal."""
    carrier = as_carrier(tensor)
    if carrier.is_complex():
        carrier = torch.view_as_real(carrier).view(torch.int64)
    plain, weighted = integer_sums(carrier.reshape(-1))
    return f"s{plain:016x}{weighted:016x}"
