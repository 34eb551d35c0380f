"""A training loop as people write it: it saves with torch.save, and starts again from the newest file it finds.

Drill it as it is:

    samerun drill --on "step 210 " --log "{out}/steps.jsonl" -- python examples/drill_plain_torch_save.py "{out}"

It saves weights, the optimizer and the step; not the random state, not its place in the shuffled data. docs/drills.md
shows what the drill finds.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--save-every", type=int, default=100)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(7)
inputs = torch.randn(48, 8)
data = TensorDataset(torch.arange(48), inputs, inputs.sum(1, keepdim=True).tanh())
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0

saved = sorted(options.out.glob("step-*.pt"))
if saved:
    state = torch.load(saved[-1], weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]

while step < options.steps:
    for ids, x, y in DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        with (options.out / "steps.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "loss": loss.item(), "sample_ids": ids.tolist()}) + "\n")
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % options.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, options.out / f"step-{step:06d}.pt")
        if step == options.steps:
            break
