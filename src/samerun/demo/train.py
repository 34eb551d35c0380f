"""The training script of the demo: the loop that a user writes, on as many ranks as it is started with.

samerun launch --nproc 2 -m samerun.demo.train RUN CORPUS --updates 40
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import samerun
from samerun.demo.corpus import PackedText
from samerun.demo.model import GPT, Ema, Shape, token_loss
from samerun.state.rng import seed_all

NUM_SEQUENCES = 200
GLOBAL_BATCH = 8
MICRO_BATCH = 2
SAVE_EVERY_UPDATES = 5
WARM_UP_UPDATES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on the text of Python's standard library.")
    parser.add_argument("run", help="where the run lives")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--updates", type=int, default=40)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = Shape()
    seed_all(7)
    model = DistributedDataParallel(GPT(shape))
    seed_all(1000 + dist.get_rank())  # each rank draws its own dropout masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: warm_up_cosine(update, arguments.updates))
    ema = Ema(model.parameters(), decay=0.95)
    text = PackedText(arguments.corpus, num_sequences=NUM_SEQUENCES, length=shape.length)
    held_out = [text[number] for number in range(3, NUM_SEQUENCES, 50)]

    def validate() -> float:
        sums = [token_loss(model.module, (tokens[None], targets[None])) for tokens, targets in held_out]
        return float(sum(loss for loss, _ in sums) / sum(count for _, count in sums))

    data = samerun.Data(text, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=7)
    run = samerun.Run(
        arguments.run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        extra={"ema": ema},
        precision="fp16",
        max_norm=1.0,
        save_every=f"{SAVE_EVERY_UPDATES} updates",
        keep_last=4,
    )
    with run:
        for window in run.windows(until=arguments.updates):
            for batch in window:
                loss_sum, weight = token_loss(model, batch)
                window.backward(loss_sum, weight)
            outcome = window.step()
            if outcome.updated:
                ema.update()
                if run.progress.updates % 10 == 0:
                    run.evaluate("val_loss", validate, better="min")
    dist.destroy_process_group()


def warm_up_cosine(update: int, num_updates: int) -> float:
    if update < WARM_UP_UPDATES:
        return (update + 1) / WARM_UP_UPDATES
    done = (update - WARM_UP_UPDATES) / max(1, num_updates - WARM_UP_UPDATES)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, done)))


if __name__ == "__main__":
    main()
