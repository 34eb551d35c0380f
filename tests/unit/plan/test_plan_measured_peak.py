"""The memory plan against reality: live bytes of a small GPT on CPU, under each recompute mode.

Every storage that an operator returns is counted from birth to death, so the figure is what the program holds, without
allocator or process. The plan is made without a reserve.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from samerun.plan import MemoryPlan, MemoryRequest, Microbatch, Precision, Recompute, count_parameters, gpt, plan_memory
from samerun.plan.memory.request import Activations, Attention

HIDDEN, HEADS, VOCAB, LENGTH, MICRO = 56, 7, 130, 96, 3


class LiveBytes(TorchDispatchMode):
    """Sums the storages alive now, and the largest sum seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


class Block(nn.Module):
    def __init__(self, *, fused: bool, selective: bool) -> None:
        super().__init__()
        self.fused, self.selective = fused, selective
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.transpose(-1, -2)) * (HIDDEN // HEADS) ** -0.5
        return scores.softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, HIDDEN // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = checkpoint(self.core, q, k, v, use_reentrant=False) if self.selective else self.core(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Learned positions, tied head: the family that the plan calls gpt."""

    def __init__(self, *, num_layers: int, fused: bool, segment: int = 0, selective: bool = False) -> None:
        super().__init__()
        self.segment = segment
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(fused=fused, selective=selective) for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)

    def run(self, start: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[start : start + self.segment]:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        if self.segment:
            for start in range(0, len(self.blocks), self.segment):
                x = checkpoint(self.run, start, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        return self.norm(x) @ self.tokens.weight.t()


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured_peak(model: Gpt) -> int:
    """Peak of the second window, when the optimizer's state exists."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(VOCAB, (MICRO, LENGTH))

    def window() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        del loss
        optimizer.step()

    with one_thread():
        window()
        live = LiveBytes()
        optimizer.zero_grad(set_to_none=True)
        states = [value for state in optimizer.state.values() for value in state.values()]
        for tensor in (*model.parameters(), ids, *states):
            live.add(tensor)
        with live:
            window()
    return live.peak


def planned(mode: Recompute, attention: Attention, num_layers: int, segment: int = 3) -> MemoryPlan:
    shape = gpt(num_layers=num_layers, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCAB, max_positions=LENGTH)
    activations = Activations(attention=attention, recompute=mode, segment_layers=segment)
    batch = Microbatch(num_sequences=MICRO, sequence_length=LENGTH)
    return plan_memory(
        MemoryRequest(shape=shape, precision=Precision.FP32, batch=batch, activations=activations, reserve_bytes=0)
    )


def build(mode: Recompute, attention: Attention, num_layers: int) -> Gpt:
    segment = {Recompute.FULL: 1, Recompute.EVERY_K: 3, Recompute.SQRT: 3}.get(mode, 0)
    fused = attention is Attention.FLASH
    return Gpt(num_layers=num_layers, fused=fused, segment=segment, selective=mode is Recompute.SELECTIVE)


@pytest.mark.parametrize(("attention", "num_layers"), [(Attention.FLASH, 9), (Attention.MATH, 7)])
@pytest.mark.parametrize("mode", list(Recompute))
def test_the_measured_peak_lies_within_the_bounds(mode: Recompute, attention: Attention, num_layers: int) -> None:
    plan = planned(mode, attention, num_layers)
    peak = measured_peak(build(mode, attention, num_layers))
    assert plan.upper_bytes is not None
    assert plan.lower_bytes <= peak <= plan.upper_bytes


@pytest.mark.parametrize("attention", list(Attention))
def test_the_bounds_tell_the_modes_apart(attention: Attention) -> None:
    """The control: bounds wide enough to hold anything would hold the wrong mode too."""
    all_kept = measured_peak(build(Recompute.NONE, attention, 9))
    lean = planned(Recompute.FULL, attention, 9)
    assert lean.upper_bytes is not None
    assert all_kept > lean.upper_bytes
    recomputed = measured_peak(build(Recompute.FULL, attention, 9))
    assert recomputed < planned(Recompute.NONE, attention, 9).lower_bytes


def test_shape_and_live_model_count_the_same_parameters() -> None:
    """On the meta device nothing is allocated; tied weights count once."""
    with torch.device("meta"):
        model = Gpt(num_layers=7, fused=True)
    count = count_parameters(model)
    shape = planned(Recompute.NONE, Attention.FLASH, 7).request.shape
    assert shape is not None
    assert count.num_params == count.num_trainable == shape.num_params
    assert count.param_bytes == 4 * shape.num_params
    assert count.largest_name == "blocks.6.up.weight" or count.num_largest == 4 * HIDDEN**2
    request = replace(planned(Recompute.NONE, Attention.FLASH, 7).request, shape=None, num_params=count.num_params)
    assert plan_memory(request).term("weights").lower_bytes == count.param_bytes
