"""A stack of attention blocks with dropout, for the tests of recompute; also run by ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from samerun.step import Step
from samerun.step.recompute import apply_recompute

WIDTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        shares = F.dropout(torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, dim=-1), 0.2, self.training)
        return shares @ v


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + F.dropout(self.down(torch.relu(self.up(x))), 0.3, self.training)


class Stack(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.out(x)
        return scores


def stack(num_blocks: int) -> Stack:
    torch.manual_seed(4)
    return Stack(num_blocks)


def losses_and_gradients(model: nn.Module, precision: str) -> list[Any]:
    """Two windows of two microbatches with dropout; loss and every gradient's exact values, and the next draw."""
    torch.manual_seed(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, optimizer, precision=precision)
    seen: list[Any] = []
    for _ in range(2):
        window = step.window([torch.randn(3, 5, WIDTH), torch.randn(2, 5, WIDTH)])
        for x in window:
            window.backward(model(x).float().square().sum(), len(x))
        seen.append(window.step().loss)
    seen += [local(parameter).flatten().tolist() for parameter in model.parameters()]
    return [*seen, torch.rand(2).tolist()]


def local(parameter: torch.Tensor) -> torch.Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def sharded(policy: str, shard_first: bool, num_windows: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = stack(4)
    if not shard_first:
        apply_recompute(model, policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if shard_first:
        apply_recompute(model, policy)
    return losses_and_gradients(model, "fp32")
