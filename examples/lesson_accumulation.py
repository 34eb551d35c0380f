"""Gradient accumulation: a larger batch in the same memory, at the price of time.

python examples/lesson_accumulation.py --num-steps 100 --accum-grid 1,2,4,8,16

For each number K of microbatches in a window: the effective batch, the last loss, the time of a step beside that of
K = 1, and how far the window's gradient is from that of one big batch over the same samples (float64, so only the
order of additions is left). Doubling K doubles the work of a step: accumulation saves memory, never time.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from samerun.step import Step

MICRO_BATCH, WIDTH, CLASSES = 8, 64, 10


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, CLASSES)).double()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(number)
    inputs = torch.randn(MICRO_BATCH, WIDTH, generator=rng, dtype=torch.float64)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


def train(accum_steps: int, num_steps: int) -> tuple[float, float]:
    """(last loss, seconds a step)."""
    model = make()
    step = Step(model, torch.optim.AdamW(model.parameters(), lr=3e-3), max_norm=1.0)
    start, loss = time.perf_counter(), float("nan")
    for number in range(num_steps):
        window = step.window([batch(number * accum_steps + k) for k in range(accum_steps)])
        for inputs, targets in window:
            window.backward(F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
        loss = window.step().loss
    return loss, (time.perf_counter() - start) / num_steps


def distance_to_one_big_batch(accum_steps: int) -> float:
    """Largest difference between any parameter after one SGD step of rate 1: accumulated against at once."""
    parts = [batch(k) for k in range(accum_steps)]
    at_once, accumulated = make(), make()
    for model, batches in (
        (at_once, [tuple(torch.cat(column) for column in zip(*parts, strict=True))]),
        (accumulated, parts),
    ):
        step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        window = step.window(batches)
        for inputs, targets in window:
            window.backward(F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
        window.step()
    pairs = zip(at_once.parameters(), accumulated.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--accum-grid", default="1,2,4,8")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    grid = [int(text) for text in options.accum_grid.split(",")]
    train(1, 2)  # the first steps of a process are slow
    base: float | None = None
    print("accum  effective batch  last loss  ms/step  x first row  distance to one big batch")
    for accum_steps in grid:
        loss, seconds = train(accum_steps, options.num_steps)
        base = base or seconds
        print(
            f"{accum_steps:5d}  {accum_steps * MICRO_BATCH:15d}  {loss:9.4f}  {seconds * 1e3:7.2f}  "
            f"{seconds / base:11.1f}  {distance_to_one_big_batch(accum_steps):.1e}"
        )


if __name__ == "__main__":
    main()
