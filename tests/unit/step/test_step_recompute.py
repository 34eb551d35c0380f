"""Recomputing activations changes no bit of any gradient, keeps names and copies, and costs what the plan says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rank_pool import RankPool
from samerun.errors import UsageError
from samerun.step.recompute import Kind, Policy, apply_recompute, plan_recompute
from step_recompute_models import Stack, losses_and_gradients, stack

POLICIES = ["none", "full", "every 4", "every 3", "every 1", "sqrt", "selective"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_bitwise_those_without(policy: str, precision: str) -> None:
    expected = losses_and_gradients(stack(10), precision)
    model = stack(10)
    apply_recompute(model, policy)
    assert losses_and_gradients(model, precision) == expected


def test_dropout_masks_matter_to_this_check() -> None:
    """The control: without the first forward's random stream the gradients are others."""
    expected = losses_and_gradients(stack(4), "fp32")
    model = stack(4)
    for block in model.blocks:
        forward = block.forward

        def again(x: torch.Tensor, forward: Any = forward) -> Any:
            return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)

        block.forward = again
    assert losses_and_gradients(model, "fp32") != expected


@pytest.mark.parametrize("policy", POLICIES)
def test_names_state_dicts_and_copies_stay(policy: str) -> None:
    model = stack(6)
    keys = list(model.state_dict())
    apply_recompute(model, policy)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == keys
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert losses_and_gradients(twin, "fp32") == losses_and_gradients(stack(6), "fp32")


@pytest.mark.parametrize(
    ("policy", "num_blocks", "num_checkpoints", "units"),
    [
        ("none", 64, 0, 3.0),
        ("full", 64, 64, 4.0),
        ("every", 64, 16, 4.0),
        ("every 5", 12, 3, 4.0),
        ("sqrt", 64, 8, 4.0),
        ("sqrt", 10, 3, 4.0),
        ("sqrt", 2, 1, 4.0),
        ("selective", 8, 8, 3.15),
    ],
)
def test_the_dry_run(policy: str, num_blocks: int, num_checkpoints: int, units: float) -> None:
    model = stack(num_blocks)
    plan = plan_recompute(model, policy)
    assert (plan.num_blocks, plan.num_checkpoints, plan.step_units) == (num_blocks, num_checkpoints, units)
    assert {type(block).__name__ for block in model.blocks} == {"Block"}, "a dry run changes nothing"
    if policy not in ("none", "selective"):
        assert [name for segment in plan.segments for name in segment] == [f"blocks.{k}" for k in range(num_blocks)]
    if policy == "selective":
        assert plan.segments[0] == ("blocks.0.attention",)
    assert apply_recompute(model, policy) == plan


def test_the_dry_run_reads_as_a_sentence() -> None:
    assert str(plan_recompute(stack(6), "every 4")).splitlines() == [
        "recompute every: 2 checkpoints over 6 blocks, a step is 4 units instead of 3",
        "  blocks.0 … blocks.3",
        "  blocks.4 … blocks.5",
    ]


def forwards(model: Stack) -> int:
    """How often blocks run in four microbatches."""
    count = 0

    def one(*_: Any) -> None:
        nonlocal count
        count += 1

    for block in model.blocks:
        block.up.register_forward_hook(one)
    losses_and_gradients(model, "fp32")
    return count


@pytest.mark.parametrize(("policy", "times"), [("none", 1), ("full", 2), ("every 4", 2), ("sqrt", 2), ("selective", 1)])
def test_every_block_runs_as_often_as_the_plan_says(policy: str, times: int) -> None:
    model = stack(8)
    apply_recompute(model, policy)
    assert forwards(model) == 4 * 8 * times


def kept_bytes(policy: str) -> int:
    """Bytes that a forward keeps for its backward outside of what is computed again."""
    model = stack(16)
    apply_recompute(model, policy)
    seen: dict[int, torch.Tensor] = {}
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            seen[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(3, 5, 8)).sum()
        # a checkpoint keeps its input by itself, out of sight of the hook
    del loss
    return sum(tensor.numel() * tensor.element_size() for tensor in seen.values())


def test_less_is_kept() -> None:
    none, selective, full, every = (kept_bytes(policy) for policy in ("none", "selective", "full", "every 4"))
    assert none > selective > full >= every


@pytest.mark.parametrize("policy", ["full", "every 4", "sqrt", "selective"])
def test_without_gradients_nothing_is_checkpointed(policy: str) -> None:
    model, plain = stack(6).eval(), stack(6).eval()
    apply_recompute(model, policy)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(3, 5, 8)), plain(torch.ones(3, 5, 8)))


@pytest.mark.parametrize("order", ["recompute first", "shard first"])
@pytest.mark.parametrize("policy", ["none", "full", "every 2", "sqrt", "selective"])
def test_composes_with_fsdp2_in_either_order(ranks: RankPool, policy: str, order: str) -> None:
    answers = ranks.run(
        2, "step_recompute_models:sharded", policy=policy, shard_first=order == "shard first", num_windows=2
    )
    plain = ranks.run(2, "step_recompute_models:sharded", policy="none", shard_first=False, num_windows=2)
    assert answers == plain


class Residual(nn.Module):
    """Adds something between its blocks, so that segments would leave it out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + 1
        return x


def test_a_model_that_works_between_its_blocks_is_refused_in_segments() -> None:
    model = Residual()
    apply_recompute(model, "every 2")
    with pytest.raises(UsageError, match="policy 'full'"):
        model(torch.ones(2, 4))
    alone = Residual()
    apply_recompute(alone, "full")
    alone(torch.ones(2, 4)).sum().backward()


def test_what_cannot_be_applied_is_refused() -> None:
    with pytest.raises(UsageError, match="choose 'none'"):
        Policy.parse("some")
    with pytest.raises(UsageError, match="choose 'none'"):
        Policy.parse("full 4")
    with pytest.raises(UsageError, match="at least 1"):
        Policy.parse("every 0")
    with pytest.raises(UsageError, match="share of a forward"):
        Policy(kind=Kind.SELECTIVE, attention_fraction=1.5)
    with pytest.raises(UsageError, match="no attention module"):
        plan_recompute(Residual(), "selective")
    with pytest.raises(UsageError, match="no list of layers"):
        plan_recompute(nn.Linear(2, 2), "full")
    with pytest.raises(UsageError, match="does not contain"):
        plan_recompute(Residual(), "full", blocks=[nn.Linear(2, 2)])
    model = stack(4)
    apply_recompute(model, "full")
    with pytest.raises(UsageError, match="already"):
        apply_recompute(model, "sqrt")


def test_defaults() -> None:
    assert Policy.parse("every").layers_per_segment == 4
    assert Policy.parse("selective").attention_fraction == 0.15
