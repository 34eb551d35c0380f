"""One short digest per key of a component: what two runs, or a checkpoint and the memory it came from, compare.

Tensors: xxh3-64 over dtype, local shape and bytes (of this rank's shard for a DTensor). Plain numbers, strings and None
stand for themselves, so that a difference can say how large it is; everything else is a digest of its canonical tree.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from samerun.core.component import Captured, Plain

_LONG_TEXT = 64


def tensor_digest(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().cpu().contiguous()
    digest = xxhash.xxh3_64(f"{local.dtype}{tuple(local.shape)}".encode())
    if local.numel():
        digest.update(local.reshape(-1).view(torch.uint8).numpy().data)
    return f"x{digest.hexdigest()}"


def fingerprint(captured: Captured) -> dict[str, str]:
    """Key → digest of everything that this rank holds of one component."""
    result = {key: tensor_digest(tensor) for key, tensor in captured.tensors.items()}
    result.update({key: tensor_digest(tensor) for key, tensor in captured.rank_tensors.items()})
    _plain_digests(captured.plain, "", result)
    return result


def _plain_digests(value: Plain, path: str, result: dict[str, str]) -> None:
    if isinstance(value, dict) and not isinstance(value, Counter):
        for key in sorted(value, key=str):
            _plain_digests(value[key], f"{path}.{key}" if path else str(key), result)
    elif isinstance(value, (bool, int, float)) or value is None or (isinstance(value, str) and len(value) < _LONG_TEXT):
        result[f"{path}:"] = repr(value)
    else:
        result[f"{path}:"] = f"x{xxhash.xxh3_64(repr(_ordered(value)).encode()).hexdigest()}"


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted(((str(key), type(key).__name__, _ordered(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_ordered(item) for item in value)]
    return value
