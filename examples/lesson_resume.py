"""Interrupted in the middle of an epoch, resumed: the same losses, bit for bit.

python examples/lesson_resume.py --total-steps 24 --interrupt-at 10

The loop is written by hand, with dropout and a shuffled order. Three resumes from one checkpoint: all of it; without
the random streams; without Adam's moments. Only the first is the same run, though each of them trains on happily.
`samerun.Run` does this by itself, and for what a loop like this forgets.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samerun.lessons import load_checkpoint, restore_rng_state, save_checkpoint

NUM_SAMPLES, BATCH, WIDTH = 112, 16, 8
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH

generator = torch.Generator().manual_seed(3)
INPUTS = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
TARGETS = INPUTS.sum(dim=1, keepdim=True).tanh()


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.step = 0
        self.losses: list[float] = []

    def train(self, until: int) -> None:
        while self.step < until:
            epoch, batch_in_epoch = divmod(self.step, STEPS_PER_EPOCH)
            order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
            chosen = order[batch_in_epoch * BATCH : (batch_in_epoch + 1) * BATCH]
            loss = (self.model(INPUTS[chosen]) - TARGETS[chosen]).square().mean()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
            self.step += 1

    def save(self, path: Path) -> None:
        epoch, batch_in_epoch = divmod(self.step, STEPS_PER_EPOCH)
        state = {"step": self.step, "epoch": epoch, "batch_in_epoch": batch_in_epoch, "losses": self.losses}
        save_checkpoint(self.model, self.optimizer, self.scheduler, state, path)

    def resume(self, path: Path, *, streams: bool = True, moments: bool = True) -> None:
        rest = load_checkpoint(path, self.model, self.optimizer, self.scheduler)
        self.step, self.losses = rest["state"]["step"], list(rest["state"]["losses"])
        if not moments:
            self.optimizer.state.clear()
        if streams:
            restore_rng_state(rest["rng"])


def resumed(path: Path, total_steps: int, **left_out: bool) -> list[float]:
    """The losses of a process that began anew: other weights, other random numbers, until it loads."""
    training = Training(seed=99)
    training.resume(path, **left_out)
    training.train(total_steps)
    return training.losses


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=24)
    parser.add_argument("--interrupt-at", type=int, default=10)
    options = parser.parse_args(arguments)
    if not 0 < options.interrupt_at < options.total_steps:
        parser.error("--interrupt-at must lie between 0 and --total-steps")

    torch.set_num_threads(1)
    twin = Training(seed=7)
    twin.train(options.total_steps)
    first = Training(seed=7)
    first.train(options.interrupt_at)
    epoch, batch_in_epoch = divmod(options.interrupt_at, STEPS_PER_EPOCH)
    print(f"interrupted after step {options.interrupt_at}: epoch {epoch}, batch {batch_in_epoch} of {STEPS_PER_EPOCH}")

    ways: dict[str, Callable[[Path], list[float]]] = {
        "everything": lambda path: resumed(path, options.total_steps),
        "no random streams": lambda path: resumed(path, options.total_steps, streams=False),
        "no Adam moments": lambda path: resumed(path, options.total_steps, moments=False),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        first.save(Path(folder) / "run")
        print("resumed with        last loss  largest difference from the twin")
        for name, way in ways.items():
            losses = way(Path(folder) / "run")
            found[name] = largest_difference(losses, twin.losses)
            print(f"{name:18s}  {losses[-1]:9.6f}  {found[name]:.1e}{'  bitwise' if losses == twin.losses else ''}")
    return found


if __name__ == "__main__":
    main()
