"""Activation recompute: what a forward does not keep, the backward computes again. Same gradients, bit for bit.

    none        keep everything                              a step is 3 units (forward 1, backward 2)
    full        keep each block's input                      4 units: every forward runs twice
    every k     keep the input of every k-th block (k = 4)   4 units, 1/k of the inputs, k blocks' activations at once
    sqrt        ⌊√L⌉ segments: 8 checkpoints for L = 64      4 units; Chen et al., arXiv 1604.06174
    selective   keep all but attention's inside              3.15 units; Korthikanti et al., arXiv 2205.05198

Random streams and autocast are those of the first forward (torch's non-reentrant checkpoint), so dropout masks are the
same. Blocks change their class, not their names: state dicts stay as they are, `copy.deepcopy` works, and
`fully_shard` may come before or after. A segment of several blocks runs as a whole when its first block is called; it
requires that each block's output is the next one's input, as it is, and says so where that does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from samerun.errors import UsageError

_FORWARD_AND_BACKWARD: Final = 3.0
_ATTENTION_NAMES: Final = ("attn", "attention")
ATTENTION_FRACTION: Final = 0.15
"""Attention's share of a forward, as the cheat sheets have it; it grows with sequence length / width."""


class Kind(Enum):
    NONE = "none"
    FULL = "full"
    EVERY = "every"
    SQRT = "sqrt"
    SELECTIVE = "selective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is computed again. `Policy.parse` takes "none", "full", "every", "every 4", "sqrt", "selective"."""

    kind: Kind
    layers_per_segment: int = 4
    """Only for `every`."""
    attention_fraction: float = ATTENTION_FRACTION
    """Only for `selective`: what the plan takes attention's share of a forward to be."""

    def __post_init__(self) -> None:
        if self.layers_per_segment < 1:
            raise UsageError(f"recompute every {self.layers_per_segment} layers: at least 1")
        if not 0.0 <= self.attention_fraction <= 1.0:
            raise UsageError(f"attention_fraction={self.attention_fraction} is a share of a forward, 0 to 1")

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        if isinstance(text, Policy):
            return text
        word, _, number = text.partition(" ")
        kinds = {kind.value: kind for kind in Kind}
        if word not in kinds or (number and not (word == Kind.EVERY.value and number.isdigit())):
            raise UsageError(f"recompute={text!r} is unknown; choose 'none', 'full', 'every 4', 'sqrt' or 'selective'")
        return cls(kind=kinds[word], layers_per_segment=int(number)) if number else cls(kind=kinds[word])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePlan:
    """What a policy does to a model."""

    policy: Policy
    num_blocks: int
    segments: tuple[tuple[str, ...], ...]
    """Names of the modules that are computed again together; the first one's input is kept."""

    @property
    def num_checkpoints(self) -> int:
        return len(self.segments)

    @property
    def step_units(self) -> float:
        """Cost of a step in forwards: 3 without recompute. Counts the blocks only."""
        if self.policy.kind is Kind.NONE:
            return _FORWARD_AND_BACKWARD
        share = self.policy.attention_fraction if self.policy.kind is Kind.SELECTIVE else 1.0
        return _FORWARD_AND_BACKWARD + share

    def __str__(self) -> str:
        head = (
            f"recompute {self.policy.kind.value}: {self.num_checkpoints} checkpoints over {self.num_blocks} blocks, a "
            f"step is {self.step_units:g} units instead of 3"
        )
        return "\n".join([head, *(f"  {segment[0]}" + _up_to(segment) for segment in self.segments)])


def plan_recompute(
    model: nn.Module, policy: str | Policy, *, blocks: Sequence[nn.Module] | None = None
) -> RecomputePlan:
    """The dry run: what `apply_recompute` would do. Changes nothing.

    `blocks` are the model's layers in the order they run; by default its one list of them. Raises UsageError when
    there is none or several, and for `selective` when nothing is called attention.
    """
    policy = Policy.parse(policy)
    layers = _layers(model, blocks)
    names = {id(module): name for name, module in model.named_modules()}
    if unknown := [type(layer).__name__ for layer in layers if id(layer) not in names]:
        raise UsageError(f"blocks= holds {', '.join(unknown)}, which the model does not contain")
    sizes = _segment_sizes(policy, len(layers))
    if policy.kind is Kind.SELECTIVE:
        segments = [(name,) for layer in layers for name in _attention(names[id(layer)], layer)]
        if not segments:
            raise UsageError(
                "selective recompute found no attention module: none in the blocks has 'attn' or 'attention' in its "
                "name; choose 'full' or 'every 4', or give attention a module of its own"
            )
    else:
        ordered = iter([names[id(layer)] for layer in layers])
        segments = [tuple(next(ordered) for _ in range(size)) for size in sizes]
    return RecomputePlan(policy=policy, num_blocks=len(layers), segments=tuple(segments))


def apply_recompute(
    model: nn.Module, policy: str | Policy, *, blocks: Sequence[nn.Module] | None = None
) -> RecomputePlan:
    """Makes the model's blocks compute their activations again in the backward, in place; returns what was done."""
    plan = plan_recompute(model, policy, blocks=blocks)
    modules = dict(model.named_modules())
    for segment in plan.segments:
        members = [modules[name] for name in segment]
        if any(isinstance(member, (_Alone, _Head, _Follower)) for member in members):
            raise UsageError(f"{segment[0]} is recomputed already; apply one policy, once")
        if len(members) == 1:
            _become(members[0], _Alone)
            continue
        head, *followers = members
        _become(head, _Head)
        head.__dict__["_followers"] = tuple(followers)  # not registered: they keep their place in the model
        for follower in followers:
            _become(follower, _Follower)
    return plan


class _Alone(nn.Module):
    """A block on its own. Its hooks (FSDP2's all-gather) stay outside of what is computed again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


class _Head(nn.Module):
    """The first block of a segment: runs all of it."""

    _followers: tuple[_Follower, ...]

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            result = self._run(hidden, *args, **kwargs)
        else:
            # hooks run inside: stopping half-way through the last forward would leave FSDP2's unfinished
            with set_checkpoint_early_stop(False):
                result = checkpoint(self._run, hidden, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
        for follower in self._followers:
            follower.__dict__["_expected"] = (result, args, kwargs)
        return result

    def _run(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = nn.Module.__call__(self, hidden, *args, **kwargs)
        for follower in self._followers:
            hidden = nn.Module.__call__(follower, hidden, *args, **kwargs)
        return hidden


class _Follower(nn.Module):
    """A later block of a segment: has run already when the model calls it."""

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        result, first_args, first_kwargs = self.__dict__.pop("_expected", (None, (), {}))
        same = len(args) == len(first_args) and all(one is two for one, two in zip(args, first_args, strict=True))
        same = same and kwargs.keys() == first_kwargs.keys() and all(kwargs[k] is first_kwargs[k] for k in kwargs)
        if hidden is not result or not same:
            raise UsageError(
                f"recompute in segments: {type(self).__name__} was not called with exactly what the block before it "
                f"returned and the same other arguments; use the policy 'full', which takes each block by itself"
            )
        return hidden


def _become(module: nn.Module, role: type[nn.Module]) -> None:
    cls = type(module)
    module.__class__ = type(f"Recomputed{cls.__name__}", (role, cls), {"__doc__": cls.__doc__})


def _segment_sizes(policy: Policy, num_blocks: int) -> list[int]:
    if policy.kind is Kind.FULL:
        return [1] * num_blocks
    if policy.kind is Kind.EVERY:
        size = policy.layers_per_segment
        return [min(size, num_blocks - start) for start in range(0, num_blocks, size)]
    if policy.kind is Kind.SQRT:
        num = max(1, round(math.sqrt(num_blocks)))
        return [num_blocks // num + (position < num_blocks % num) for position in range(num)]
    return []


def _layers(model: nn.Module, blocks: Sequence[nn.Module] | None) -> list[nn.Module]:
    if blocks is not None:
        return list(_each(blocks))
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and name
    }
    outermost = {name: m for name, m in found.items() if not any(name.startswith(f"{other}.") for other in found)}
    if len(outermost) != 1:
        what = f"has several lists of layers ({', '.join(outermost)})" if outermost else "has no list of layers"
        raise UsageError(f"{type(model).__name__} {what}; say which run one after the other: blocks=model.layers")
    return list(_each(next(iter(outermost.values()))))


def _each(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    yield from blocks


def _attention(prefix: str, block: nn.Module) -> list[str]:
    """The outermost modules inside a block whose own name says attention."""
    found: list[str] = []
    for name, _ in block.named_modules(prefix=prefix):
        own = name.rpartition(".")[2].lower()
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name != prefix and not inside and any(word in own for word in _ATTENTION_NAMES):
            found.append(name)
    return found


def _up_to(segment: Sequence[str]) -> str:
    return f" … {segment[-1]}" if len(segment) > 1 else ""
