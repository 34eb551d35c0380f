"""What a policy really keeps and really costs, counted byte by byte and flop by flop, against what its plan says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from samerun.step.recompute import apply_recompute, plan_recompute
from step_recompute_models import Stack, stack

INPUT_BYTES = 3 * 5 * 8 * 4
"""Of one block: 3 × 5 × 8 floats."""
POLICIES = ["full", "every 4", "sqrt", "selective"]


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operations made and that still exist, and the most there ever were."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self._parameters = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
        self._live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        return sum(self._live.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if (ref := StorageWeakRef(storage)) not in self._parameters:  # a view of one is a result, too
                    self._live.setdefault(ref, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result


@functools.cache
def measured(policy: str, num_blocks: int) -> tuple[int, int]:
    """(live after the forward, most ever in forward and backward), without gradients of parameters."""
    model = stack(num_blocks).requires_grad_(False)
    apply_recompute(model, policy)
    x = torch.ones(3, 5, 8, requires_grad=True)
    with LiveBytes(model) as live:
        loss = model(x).sum()
        after_forward = live.now
        loss.backward()  # type: ignore[no-untyped-call]
    return after_forward, live.peak


def per_block(num_blocks: int = 8) -> int:
    """What a block keeps for its backward when nothing is computed again."""
    more, fewer = measured("none", 2 * num_blocks)[0], measured("none", num_blocks)[0]
    assert (more - fewer) % num_blocks == 0
    return (more - fewer) // num_blocks


@pytest.mark.parametrize("policy", ["full", "every 4", "sqrt"])
def test_a_segment_keeps_its_input_and_nothing_else(policy: str) -> None:
    """Exact: bytes after a forward grow by one block input for each checkpoint of the plan."""
    fewer, more = (plan_recompute(stack(n), policy).num_checkpoints for n in (16, 64))
    grown = measured(policy, 64)[0] - measured(policy, 16)[0]
    assert grown == (more - fewer) * INPUT_BYTES


def test_selective_keeps_all_but_attentions_inside() -> None:
    whole, partly = per_block(), (measured("selective", 16)[0] - measured("selective", 8)[0]) // 8
    assert INPUT_BYTES < partly < whole


@pytest.mark.parametrize("policy", ["full", "every 4", "sqrt"])
@pytest.mark.parametrize("num_blocks", [16, 64])
def test_the_peak_is_that_of_the_plan(policy: str, num_blocks: int) -> None:
    """checkpoints · input + blocks of a segment · what a block keeps, give or take what a block works with."""
    plan = plan_recompute(stack(num_blocks), policy)
    longest = max(len(segment) for segment in plan.segments)
    planned = plan.num_checkpoints * INPUT_BYTES + longest * per_block()
    peak = measured(policy, num_blocks)[1]
    assert planned - per_block() <= peak <= planned + per_block()
    assert peak < measured("none", num_blocks)[1] / 2


def flops(model: Stack) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(3, 5, 8, requires_grad=True)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("policy", POLICIES)
def test_extra_work_is_that_of_the_plan(policy: str) -> None:
    """Counted in multiplications: a step of the blocks takes the plan's units, exactly, where the share is measured."""
    blocks = flops(stack(16)) - flops(stack(0))  # 3 units
    assert blocks % 3 == 0
    unit = blocks // 3
    model = stack(16)
    plan = apply_recompute(model, policy)
    extra = flops(model) - flops(stack(0)) - blocks
    if policy == "selective":
        with FlopCounterMode(display=False) as counter:
            model.blocks[0].attention(torch.ones(3, 5, 8))
        last_product = 2 * 3 * 5 * 5 * 8  # nothing needs its result again, and torch stops before it
        assert extra == 16 * (counter.get_total_flops() - last_product)
    else:
        assert extra == (plan.step_units - 3) * unit
