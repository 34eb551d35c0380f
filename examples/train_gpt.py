"""Trains a small GPT on the text of Python's standard library. Kill it at any moment and start it again: the same run.

python examples/train_gpt.py runs/one
torchrun --nproc-per-node 2 examples/train_gpt.py runs/ddp
torchrun --nproc-per-node 2 examples/train_gpt.py runs/fsdp --fsdp
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import samerun
from samerun.demo.corpus import PackedText, write_corpus
from samerun.demo.model import GPT, Shape, token_loss

parser = argparse.ArgumentParser()
parser.add_argument("run", help="where the run lives")
parser.add_argument("--updates", type=int, default=100)
parser.add_argument("--fsdp", action="store_true", help="shard parameters instead of copying them")
options = parser.parse_args()

torch.set_num_threads(1)
samerun.seed_all(7)  # Python, NumPy and torch: the same weights everywhere
model, rank, text_file = GPT(Shape()), 0, Path(f"{options.run}.text")
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(model, mesh=mesh) if options.fsdp else DistributedDataParallel(model)
samerun.seed_all(1000 + rank)  # other dropout masks on each rank
if rank == 0 and not text_file.exists():
    text_file.parent.mkdir(parents=True, exist_ok=True)
    write_corpus(text_file)
if dist.is_initialized():
    dist.barrier()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
text = PackedText(text_file, num_sequences=1000, length=64)
data = samerun.Data(text, global_batch=8, micro_batch=2, seed=7)
run = samerun.Run(options.run, model=model, optimizer=optimizer, scheduler=scheduler, data=data, save_every="5 updates")
with run:
    for window in run.windows(until=options.updates):
        for batch in window:
            loss_sum, weight = token_loss(model, batch)
            window.backward(loss_sum, weight)
        outcome = window.step()
        if rank == 0 and run.progress.updates % 10 == 0:
            print(f"update {run.progress.updates}  loss {outcome.loss:.3f}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
