"""Planned deeds that strike the model itself, for drills: they wait for its next forward, and say what they hit.

A batch that gives NaN or a wild loss is there for whoever computes it again, so it stays until the window is over: a
replay finds what the first run found. A flipped bit is a fault of the device: it happens once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

_FACTOR: Final = 30.0
"""What a poisoned batch does to the outputs of the model: its loss leaves any baseline."""
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}

OnHit = Callable[[str], None]
"""Called with the name of the parameter or module that was hit, as the model that the loop calls names it."""


class Injury:
    """`end()` takes away what still waits or stays."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def keep(self, handle: Any) -> None:
        self._handles.append(handle)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def flip_bit(on_hit: OnHit) -> Injury:
    """The lowest bit but two of the first element of the first parameter of the next model to run flips, once."""

    def strike(root: torch.nn.Module, injury: Injury) -> None:
        for name, parameter in root.named_parameters():
            if parameter.is_floating_point() and parameter.numel() and not hasattr(parameter, "to_local"):
                with torch.no_grad():
                    parameter.view(_WORDS[parameter.element_size()]).reshape(-1)[0] ^= 1 << 2
                on_hit(name)
                return

    return _at_next_forward(strike)


def poison(on_hit: OnHit) -> Injury:
    """What the next model to run gives is 30 times what it should be, until the injury ends."""

    def strike(root: torch.nn.Module, injury: Injury) -> None:
        injury.keep(root.register_forward_hook(lambda module, inputs, output: tree_map(_times(_FACTOR), output)))
        on_hit("")

    return _at_next_forward(strike)


def not_a_number(on_hit: OnHit) -> Injury:
    """The first module to give a floating tensor gives NaN, until the injury ends."""

    def strike(root: torch.nn.Module, injury: Injury) -> None:
        hit: list[torch.nn.Module] = []
        names = {module: name for name, module in root.named_modules()}

        def spoil(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            if not isinstance(output, torch.Tensor) or not output.is_floating_point() or (hit and hit[0] is not module):
                return None
            if not hit:
                hit.append(module)
                on_hit(names.get(module, ""))
            return output * float("nan")

        injury.keep(torch.nn.modules.module.register_module_forward_hook(spoil))

    return _at_next_forward(strike)


def _at_next_forward(strike: Callable[[torch.nn.Module, Injury], None]) -> Injury:
    injury = Injury()

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        injury.end()
        strike(module, injury)

    injury.keep(torch.nn.modules.module.register_module_forward_pre_hook(begin))
    return injury


def _times(factor: float) -> Callable[[Any], Any]:
    def times(leaf: Any) -> Any:
        return leaf * factor if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return times
