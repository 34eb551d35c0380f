"""A tiny decoder whose weights have the names of transformers' Llama, to make checkpoints for plans."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import samerun
from samerun.plan import Family, Shape

SHAPE = Shape(
    family=Family.LLAMA, num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_size=16, ffn_size=160,
    vocab_size=97,
)  # fmt: skip


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE.hidden_size))


def _layer() -> nn.Module:
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for name, (rows, columns) in zip(names, SHAPE.matrices, strict=True):
        part = layer.self_attn if name[0] in "qkvo" else layer.mlp
        part.add_module(name, nn.Linear(rows, columns, bias=False))
    layer.input_layernorm, layer.post_attention_layernorm = _Norm(), _Norm()
    return layer


class Decoder(nn.Module):
    """Only its embedding and head are ever called: what counts here are names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(SHAPE.vocab_size, SHAPE.hidden_size)
        self.model.layers = nn.ModuleList(_layer() for _ in range(SHAPE.num_layers))
        self.model.norm = _Norm()
        self.lm_head = nn.Linear(SHAPE.hidden_size, SHAPE.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.get_parameter("model.embed_tokens.weight")
        logits: torch.Tensor = self.lm_head(torch.nn.functional.embedding(tokens, table))
        return logits


def make_run(path: Path | str) -> None:
    """A run of two updates with a global batch of 8, in this process."""
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = samerun.Data(torch.utils.data.TensorDataset(torch.arange(20) % 97), global_batch=8, micro_batch=2, seed=7)
    with samerun.Run(path, model=model, optimizer=optimizer, data=data) as run:
        for window in run.windows(until=2):
            for (tokens,) in window:
                window.backward(model(tokens).square().sum(), len(tokens))
            window.step()
