"""A small GPT with what makes resuming hard: dropout, tied weights, and a buffer that every forward changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that every PyTorch programmer knows
from torch import nn

from samerun.demo.corpus import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    vocabulary: int = 256
    length: int = 64
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = shape.dropout
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._drop(self._attend(self.norm_attention(x)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm_mlp(x)))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.running = nn.BatchNorm1d(shape.width)  # its statistics are state that no optimizer knows
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        x = self.running(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def token_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropy over supervised tokens, and how many there are."""
    tokens, targets = batch
    logits = model(tokens).float()
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (targets != IGNORED).sum()


class Ema:
    """Exponential moving average of parameters, as people keep one beside the model."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    def update(self) -> None:
        torch._foreach_lerp_(self._average, [p.detach() for p in self._parameters], 1.0 - self._decay)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self._decay, "average": list(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._decay = state["decay"]
        for mine, saved in zip(self._average, state["average"], strict=True):
            mine.copy_(saved)
