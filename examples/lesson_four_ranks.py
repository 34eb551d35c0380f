"""Twenty steps on four ranks, stopped after ten, resumed, compared with a run that was never stopped.

python examples/lesson_four_ranks.py

FSDP2 on CPU: each rank holds a quarter of the parameters and of Adam's moments, and saves its own shard. The resumed
run starts from other weights and other random numbers until it loads. Compared on every rank: the losses and sample
ids of every step, parameters and moments at the end, bit for bit. `--forget moments` is the control: it leaves them
out of the resume, and the comparison must notice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import samerun

NUM_RANKS, NUM_STEPS, CHECKPOINT_STEP = 4, 20, 10
WIDTH = 12


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Samples that know their number."""

    def __init__(self) -> None:
        self.inputs = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.inputs[index]


def train(path: Path, *, until: int, seed: int, forget_moments: bool = False) -> dict[str, Any]:
    """Trains the run at `path` up to `until` updates; returns what this rank saw and holds."""
    samerun.seed_all(seed)  # the same weights on all ranks before they are sharded
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 1))
    fully_shard(model)
    samerun.seed_all(seed + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
    data = samerun.Data(Numbered(), global_batch=16, micro_batch=2, seed=7)
    every = f"{CHECKPOINT_STEP} updates"
    run = samerun.Run(path, model=model, optimizer=optimizer, scheduler=scheduler, data=data, save_every=every)
    steps = []
    with run:
        if forget_moments:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        for window in run.windows(until=until):
            ids = []
            for numbers, inputs in window:
                ids += numbers.tolist()
                window.backward((model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().sum(), len(inputs))
            steps.append((ids, window.step().loss))
    held = [parameter.to_local().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    held += [state[key].to_local().clone() for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {"steps": steps, "held": held}


def verify(folder: Path, *, forget_moments: bool = False) -> dict[str, bool]:
    """The twin, the first half, and the rest from its checkpoint; what is the same. Collective."""
    twin = train(folder / "twin", until=NUM_STEPS, seed=100)
    first = train(folder / "run", until=CHECKPOINT_STEP, seed=100)
    resumed = train(folder / "run", until=NUM_STEPS, seed=500, forget_moments=forget_moments)
    return same_on_all_ranks(twin, first, resumed)


def same_on_all_ranks(twin: dict[str, Any], first: dict[str, Any], resumed: dict[str, Any]) -> dict[str, bool]:
    """What is the same here and on every other rank. Collective."""
    steps = first["steps"] + resumed["steps"]
    same = {
        "sample ids": [ids for ids, _ in steps] == [ids for ids, _ in twin["steps"]],
        "losses": [loss for _, loss in steps] == [loss for _, loss in twin["steps"]],
        "parameters and moments": all(map(torch.equal, resumed["held"], twin["held"])),
    }
    everywhere = torch.tensor([int(value) for value in same.values()])
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return dict(zip(same, map(bool, everywhere.tolist()), strict=True))


def on_rank(rank: int, folder: str, forget_moments: bool) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
    same = verify(Path(folder), forget_moments=forget_moments)
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "verdict.json").write_text(json.dumps(same))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forget", choices=["moments"], help="leave this out of the resume, to see it noticed")
    options = parser.parse_args(arguments)
    multiprocessing.set_forkserver_preload(["samerun.run", "torch.distributed.fsdp"])  # imported once, not four times
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(on_rank, (folder, options.forget is not None), nprocs=NUM_RANKS, start_method="forkserver")
        same = json.loads(Path(folder, "verdict.json").read_text())
    for what, value in same.items():
        print(f"{what:23s} {'bitwise the same on all ranks' if value else 'DIFFERENT'}")
    print("RESUME VERIFIED" if all(same.values()) else "RESUME NOT VERIFIED")
    if not all(same.values()):
        sys.exit(3)


if __name__ == "__main__":
    main()
