"""Forwards without data, for sharded models whose forwards must match on every rank.

When D does not divide the microbatches some ranks have one fewer. Under FSDP2 they would leave the others waiting in
an all-gather, so the window itself repeats what the rank's last batch did, with zero output gradients; the user's loop
never sees it. Repeated are all calls of the models, those without gradients too (a teacher), and the backward goes
through the outputs that the real one reached, no others: what is gathered and reduced is then the same, in the same
order. It ends at forwards that go through neither the models nor a sharded part of them as a call: those are seen by
nobody. Random streams and buffers are put back by the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from samerun.errors import UsageError


@dataclass(slots=True)
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    with_gradients: bool
    reached: set[int] = field(default_factory=set)
    """Which leaves of the output the backward came through."""

    def note_reached(self, leaf: int, _: torch.Tensor) -> None:
        self.reached.add(leaf)

    def repeat(self) -> list[torch.Tensor]:
        """The outputs that the backward goes through."""
        with torch.set_grad_enabled(self.with_gradients):
            leaves = tree_leaves(self.module(*self.args, **self.kwargs))
        return [leaves[position] for position in sorted(self.reached)]


class ForwardRecorder:
    """Remembers the calls of the models between `start` and `stop`, the outermost ones only."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = list(models.values())
        self._calls: list[_Call] = []
        self._open: list[_Call | None] = []
        """Calls that have not returned yet; None for those inside another one."""
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        self._calls.clear()
        self._open.clear()
        if not self._handles:
            for entrance in (part for model in self._models for part in _entrances(model)):
                before = entrance.register_forward_pre_hook(self._called, with_kwargs=True, prepend=True)
                self._handles += [before, entrance.register_forward_hook(self._returned, always_call=True)]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        self.stop()
        self._calls.clear()

    def replay(self) -> None:
        """The recorded forwards once more, and one backward of zeros. Raises UsageError where nothing was recorded."""
        if not self._calls:
            raise UsageError(
                "a peer has one more microbatch, and under FSDP2 this rank must run its forwards alongside, but the "
                "last batch called no model that was given here as model(...), so there is nothing to repeat: call it "
                "so, or choose a global batch that is a multiple of micro_batch · replicas"
            )
        outputs = [output for call in self._calls for output in call.repeat()]
        if outputs:
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _in_backward():
            return  # a recompute, which the repeated backward does again by itself
        call = None
        if not self._open:
            # cut off from graphs that the real backward has freed
            args, kwargs = tree_map_only(torch.Tensor, _cut_off, (args, kwargs))
            call = _Call(module, args, kwargs, torch.is_grad_enabled())
            self._calls.append(call)
        self._open.append(call)

    def _returned(self, _: nn.Module, __: Any, output: Any) -> None:
        if _in_backward():
            return
        call = self._open.pop() if self._open else None
        if call is not None:
            for leaf, value in enumerate(tree_leaves(output)):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(partial(call.note_reached, leaf))  # type: ignore[no-untyped-call]


def _entrances(module: nn.Module, *, is_model: bool = True) -> Iterator[nn.Module]:
    """What may be called by itself: the model, and every sharded part of it. A hook inside compiled code compiles it
    anew, so that is entered from outside only.
    """
    is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    if is_model or (isinstance(module, FSDPModule) and not is_compiled):
        yield module
    if not is_compiled:
        for child in module.children():
            yield from _entrances(child, is_model=False)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cut_off(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad) if value.requires_grad else value
