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
alike = "alike" in sys.argv  # nothing that each rank draws for itself: the run may go on with other numbers of ranks
wrap = "ddp" if on_ranks else "none"
scenarios.train(sys.argv[1], wrap=wrap, until=until, precision="fp32" if alike else "fp16", draw_in_body=not alike)
if on_ranks:
    dist.destroy_process_group()
