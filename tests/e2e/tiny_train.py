"""A small training that uses samerun: `python tiny_train.py PATH [UNTIL]`, alone or under torchrun."""

from __future__ import annotations

import os
import sys

import scenarios
import torch
import torch.distributed as dist

torch.set_num_threads(1)
on_ranks = "RANK" in os.environ
if on_ranks:
    dist.init_process_group("gloo")
until = int(sys.argv[2]) if len(sys.argv) > 2 else 10
scenarios.train(sys.argv[1], wrap="ddp" if on_ranks else "none", until=until, precision="fp16")
if on_ranks:
    dist.destroy_process_group()
