"""What ranks of the pool do for the tests of the lessons."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samerun import lessons

EXAMPLES = Path(__file__).parents[1] / "examples"


def accumulate_without_sync(wrap: str) -> dict[str, Any]:
    """Three backwards, the first two without exchange; the distance to the mean over ranks of the sums."""
    torch.manual_seed(11)
    plain, inner = nn.Linear(7, 3).double(), nn.Linear(7, 3).double()
    inner.load_state_dict(plain.state_dict())
    model: nn.Module = DistributedDataParallel(inner) if wrap == "ddp" else fully_shard(inner)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    batches = [torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(3)]
    with lessons.no_sync_context(model):
        for batch in batches[:2]:
            model(batch).square().sum().backward()
    inside = inner.weight.grad
    mine = torch.zeros(3, 7, dtype=torch.float64) if inside is None else inside.detach().clone()
    if isinstance(mine, DTensor):
        mine = mine.to_local()
    peers = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(peers, mine.contiguous())
    model(batches[2]).square().sum().backward()
    for batch in batches:
        plain(batch).square().sum().backward()
    expected = plain.weight.grad
    assert expected is not None
    dist.all_reduce(expected)
    found = inner.weight.grad
    assert found is not None
    full = found.full_tensor() if isinstance(found, DTensor) else found
    return {
        "local_differs": inside is None if wrap == "fsdp" else not torch.equal(peers[0], peers[1]),
        "distance": float((full - expected / dist.get_world_size()).abs().max()),
    }


def four_ranks(folder: str) -> list[dict[str, bool]]:
    """The lesson's own comparison, and its control, which forgets the moments."""
    spec = importlib.util.spec_from_file_location("lesson_four_ranks", EXAMPLES / "lesson_four_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run, control, halfway = Path(folder, "run"), Path(folder, "control"), module.CHECKPOINT_STEP
    twin = module.train(Path(folder, "twin"), until=module.NUM_STEPS, seed=100)
    first = module.train(run, until=halfway, seed=100)
    if dist.get_rank() == 0:
        shutil.copytree(run, control)
    dist.barrier()
    resumed = module.train(run, until=module.NUM_STEPS, seed=500)
    forgetful = module.train(control, until=module.NUM_STEPS, seed=500, forget_moments=True)
    return [module.same_on_all_ranks(twin, first, last) for last in (resumed, forgetful)]
