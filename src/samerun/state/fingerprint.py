"""One short digest per key of a component: what two runs, or a checkpoint and the memory it came from, compare.

Tensors: xxh3-64 over dtype, local shape and bytes (of this rank's shard for a DTensor). Plain numbers, strings and None
stand for themselves, so that a difference can say how large it is; everything else is a digest of its canonical tree.
Where bytes must not travel, `integer_sums` are computed where a tensor lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from samerun.core.component import Captured, Plain

_LONG_TEXT = 64
_SUMMED_AT_ONCE = 1 << 22
"""Elements: their weighted sum needs sixteen bytes for each beside the tensor."""
_AMBIGUOUS = frozenset("[]:'\"")


def tensor_digest(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().cpu().contiguous()
    digest = xxhash.xxh3_64(f"{local.dtype}{tuple(local.shape)}".encode())
    if local.numel():
        digest.update(local.reshape(-1).view(torch.uint8).numpy().data)
    return f"x{digest.hexdigest()}"


def integer_sums(elements: torch.Tensor) -> tuple[int, int]:
    """(Σ e, Σ (position + 1)·e) over flat integers, mod 2^64, whatever the device; one read by the host.

    One flipped bit changes the first, a swap of two unequal elements the second. Ends at changes that keep both.
    """
    totals = torch.zeros(2, dtype=torch.int64, device=elements.device)
    for start in range(0, elements.numel(), _SUMMED_AT_ONCE):
        part = elements[start : start + _SUMMED_AT_ONCE].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        totals += torch.stack([part.sum(), (part * places).sum()])
    plain, weighted = totals.tolist()
    return plain % 2**64, weighted % 2**64


def fingerprint(captured: Captured) -> dict[str, str]:
    """Key → digest of everything that this rank holds of one component."""
    result = {key: tensor_digest(tensor) for key, tensor in captured.tensors.items()}
    result.update({key: tensor_digest(tensor) for key, tensor in captured.rank_tensors.items()})
    return {**result, **plain_digests(captured.plain, taken=result)}


def plain_digests(plain: Plain, *, taken: Collection[str]) -> dict[str, str]:
    """The plain part alone; `taken` are the tensors' keys, which no path of it may hide."""
    result = dict.fromkeys(taken, "")
    _plain_digests(plain, "", result)
    return {name: digest for name, digest in result.items() if name not in taken}


def _plain_digests(value: Plain, path: str, result: dict[str, str]) -> None:
    if isinstance(value, dict) and value and not isinstance(value, Counter):
        for key in sorted(value, key=_key):
            _plain_digests(value[key], f"{path}.{_key(key)}" if path else _key(key), result)
        return
    name = f"{path}:"
    while name in result:  # a dotted key and a nested one share a path; neither may hide the other
        name += "'"
    if isinstance(value, (bool, int, float)) or value is None or (isinstance(value, str) and len(value) < _LONG_TEXT):
        result[name] = repr(value)
    else:
        result[name] = f"x{xxhash.xxh3_64(repr(_ordered(value)).encode()).hexdigest()}"


def _key(key: str | int) -> str:
    """Apart for 1 and "1": a table whose integer keys came back as strings is another table."""
    return f"[{key}]" if isinstance(key, int) else repr(key) if _AMBIGUOUS.intersection(key) else key


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        items = sorted(((_key(key), _ordered(item)) for key, item in value.items()), key=lambda item: item[0])
        return [type(value).__name__, *items]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_ordered(item) for item in value)]
    return value
