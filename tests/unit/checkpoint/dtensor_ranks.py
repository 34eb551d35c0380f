"""What each rank of a real process group does in test_store_dtensor.py: save or load the same global tensors."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.ranks.torch_group import TorchGroup
from samerun.state.fingerprint import fingerprint

SHAPES = [(7, 13), (13, 2), (1, 5), (2, 3, 4), (16,), (0, 3)]
WORDS: dict[str, Placement] = {"R": Replicate(), "0": Shard(0), "1": Shard(1)}


def tensor(number: int) -> torch.Tensor:
    shape = SHAPES[number]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 100 * number


def distributed(number: int, mesh_shape: list[int], word: str, *, blank: bool = False) -> DTensor:
    full = tensor(number)
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    placements = [WORDS[letter] for letter in word]
    placements = [p if not isinstance(p, Shard) or p.dim < full.dim() else Shard(0) for p in placements]
    if blank:
        full = torch.full_like(full, -1.0)
    return distribute_tensor(full, mesh, placements)


def save(path: str, mesh_shape: list[int], word: str) -> dict[str, int]:
    tensors = {str(number): distributed(number, mesh_shape, word) for number in range(len(SHAPES))}
    store = Store(path, group=TorchGroup())
    progress = Progress(windows=Windows(1), updates=Updates(1))
    captured = Captured(tensors=tensors)
    entry = store.save({"weights": captured}, progress, facts={}).result()
    assert store.open(entry).digests == {"weights": fingerprint(captured)}
    return {"bytes": entry.num_bytes}


def load(path: str, mesh_shape: list[int], word: str) -> list[str]:
    """Names of what came back wrong; nothing when all is well."""
    store = Store(path, group=TorchGroup())
    wrong = []
    with store.open(store.catalog().entries[0]) as checkpoint:
        source = checkpoint.source("weights")
        for number in range(len(SHAPES)):
            target = distributed(number, mesh_shape, word, blank=True)
            wanted = distributed(number, mesh_shape, word)
            source.read_into(str(number), target)
            if not torch.equal(target.to_local(), wanted.to_local()):
                wrong.append(f"{number}: {target.to_local()} != {wanted.to_local()}")
        wrong += checkpoint.unconsumed()
    return wrong


def save_partial(path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    unreduced = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    store = Store(path, group=TorchGroup())
    store.open_attempt({})
    try:
        store.save({"weights": Captured(tensors={"w": unreduced})}, Progress(), facts={})
    except ValueError as error:
        return str(error)
    return "saved"
