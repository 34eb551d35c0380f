"""Twenty safe AMP steps in fp16, each row tagged STEP or SKIP.

python examples/lesson_amp_step.py

Step 7 has a loss that is not finite: skipped, the loss scale stays. Step 12 has a gradient that overflows: skipped, the
scale halves. No parameter changes in either. fp16 autocast and the loss scaler run on the CPU as they do on a GPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from samerun.step import Step

BAD_LOSS_AT, OVERFLOW_AT = 7, 12


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=20)
    num_steps = parser.parse_args(arguments).num_steps

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    step = Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision="fp16", max_norm=1.0)

    print("step  tag   reason               loss      norm -> clipped      scale")
    for number in range(num_steps):
        inputs = torch.randn(4, 16, 8)
        window = step.window(list(inputs))
        for batch in window:
            loss_sum = (model(batch).float() - batch.sum(dim=1, keepdim=True)).square().sum()
            if number == BAD_LOSS_AT:
                loss_sum = loss_sum * float("nan")
            if number == OVERFLOW_AT:
                loss_sum = loss_sum * 1e6  # finite, but its scaled gradient is beyond fp16's 65,504
            window.backward(loss_sum, len(batch))
        outcome = window.step()
        tag = "STEP" if outcome.updated else "SKIP"
        norms = f"{outcome.grad_norm:8.3f} -> {outcome.grad_norm_clipped:6.3f}"
        print(f"{number:4d}  {tag}  {outcome.reason.value:16s} {outcome.loss:11.4g}  {norms}  {outcome.scale:9.0f}")
    print(f"{step.progress.updates} updates, {step.progress.skipped} skipped, skip rate {step.skip_rate.value:.1%}")


if __name__ == "__main__":
    main()
