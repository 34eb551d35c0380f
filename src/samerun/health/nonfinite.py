"""Where a number first stopped being finite: state, a module's forward, or a gradient, found by running it once more.

A replay draws the same random numbers only if the caller's `run_once` restores them; either way random streams, buffers
and gradients are put back afterwards, so a replay leaves no trace. Torch is imported when one is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


class Place(Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    """It came in with the batch."""
    OUTPUT = "output"
    """A module made it from finite inputs: the culprit's forward."""
    GRADIENT = "gradient"
    """The forward was finite; in backward this was the first gradient that was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The first tensor that was not finite."""

    place: Place
    name: str
    """Of the parameter, the buffer or the module."""
    kind: str
    """The module's class; the tensor's dtype for state."""
    num_nan: int
    num_inf: int
    num_elements: int

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"place": self.place.value}

    def __str__(self) -> str:
        what = f"{self.num_nan} NaN and {self.num_inf} infinite of {self.num_elements} numbers"
        return f"{self.place.value} of {self.name or 'the model'} ({self.kind}): {what}"


def bad_state(models: Mapping[str, nn.Module]) -> Culprit | None:
    """The first parameter or buffer that is not finite already: no replay could be blamed then."""
    for model_name, model in models.items():
        prefix = f"{model_name}." if len(models) > 1 else ""
        places = ((Place.PARAMETER, model.named_parameters()), (Place.BUFFER, model.named_buffers()))
        for place, tensors in places:
            for name, tensor in tensors:
                if (found := _counted(tensor)) is not None:
                    return Culprit(place=place, name=prefix + name, kind=str(tensor.dtype), **found)
    return None


def find_non_finite(models: Mapping[str, nn.Module], run_once: Callable[[], object]) -> Culprit | None:
    """Runs `run_once` (a forward, and a backward if gradients are in question) and names the first bad tensor.

    None: everything that passed through modules was finite; then it arises outside them, as in the loss function, or
    did not come back. Under FSDP2 and TP all ranks must call this together, since their forwards hold collectives.
    """
    from samerun.state.rng import preserved_rng

    found = bad_state(models)
    if found is not None:
        return found
    events: list[Culprit] = []
    with preserved_rng(), _untouched(models), _watched(models, events):
        run_once()
    return events[0] if events else None


class InputKeeper:
    """Keeps references to what the models were called with between `begin` and `end`, so that a bad window can be run
    again. Costs the memory of the window's inputs, which the loop would otherwise let go one by one.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._called = dict(models)
        self._models = {name: _bare(model) for name, model in models.items()}
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._handles: list[Any] = []

    def __deepcopy__(self, _: Any) -> InputKeeper:
        """A copy of a model inside the loop must not drag the window's inputs along."""
        return self

    def begin(self) -> None:
        self.end()
        self._handles = [
            model.register_forward_pre_hook(_Keep(self, bare), with_kwargs=True)
            for model, bare in zip(self._called.values(), self._models.values(), strict=True)
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def replay(self, context: contextlib.AbstractContextManager[Any]) -> Culprit | None:
        """The forwards of this window once more, without gradients, inside `context` (autocast)."""
        import torch

        calls = list(self._calls)

        def run() -> None:
            with torch.no_grad(), context:
                for module, args, kwargs in calls:
                    module(*args, **kwargs)

        return find_non_finite(self._models, run)

    def state_is_bad(self) -> bool:
        """Whether a parameter or buffer is not finite already."""
        return bad_state(self._models) is not None

    @property
    def calls(self) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
        """(model, args, kwargs) of each forward of this window."""
        return list(self._calls)

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append((module, args, kwargs))


class _Keep:
    """The hook: on the model as the loop calls it, for a replay of what it wraps. An evaluation is no part of it."""

    def __init__(self, keeper: InputKeeper, bare: nn.Module) -> None:
        self._keeper = keeper
        self._bare = bare

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if torch.is_grad_enabled():
            self._keeper.keep(self._bare, args, kwargs)

    def __deepcopy__(self, _: Any) -> _Keep:
        return self


def _bare(model: nn.Module) -> nn.Module:
    """Without DDP, whose forward broadcasts buffers, and torch.compile, which hides the modules; in either order."""
    while True:
        is_ddp = type(model).__name__ == "DistributedDataParallel"
        inner = getattr(model, "module" if is_ddp else "_orig_mod", None)
        if inner is None:
            return model
        model = inner


@contextlib.contextmanager
def _untouched(models: Mapping[str, nn.Module]) -> Iterator[None]:
    import torch

    buffers = [(b, b.detach().clone()) for model in models.values() for b in model.buffers()]
    gradients = [(p, p.grad) for model in models.values() for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def _watched(models: Mapping[str, nn.Module], events: list[Culprit]) -> Iterator[None]:
    handles = []
    for model_name, model in models.items():
        prefix = f"{model_name}." if len(models) > 1 else ""
        for name, module in model.named_modules():
            hook = _Hook(prefix + name, events, is_root=module is model)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook_of = _gradient_hook(prefix + name, "parameter", events)
                handles.append(parameter.register_hook(hook_of))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Hook:
    def __init__(self, name: str, events: list[Culprit], *, is_root: bool) -> None:
        self._name = name
        self._events = events
        self._is_root = is_root

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._events:
            return
        came_in = _first_bad((args, kwargs))
        made = _first_bad(output)
        if came_in is not None or made is not None:
            place = Place.OUTPUT if came_in is None else Place.INPUT
            found = made if came_in is None else came_in
            assert found is not None
            self._events.append(Culprit(place=place, name=self._name, kind=type(module).__name__, **found))
            return
        for tensor in _tensors(output):
            if tensor.requires_grad and tensor.is_floating_point():
                hook = _gradient_hook(self._name, type(module).__name__, self._events)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _gradient_hook(name: str, kind: str, events: list[Culprit]) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor) -> None:
        if not events and (found := _counted(gradient)) is not None:
            events.append(Culprit(place=Place.GRADIENT, name=name, kind=kind, **found))

    return hook


def _first_bad(tree: Any) -> dict[str, int] | None:
    return next((found for tensor in _tensors(tree) if (found := _counted(tensor)) is not None), None)


def _tensors(tree: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _counted(tensor: torch.Tensor) -> dict[str, int] | None:
    import torch

    value = tensor.detach()
    if hasattr(value, "to_local"):
        value = value.to_local()
    if not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all()):
        return None
    return {
        "num_nan": int(torch.isnan(value).sum()),
        "num_inf": int(torch.isinf(value).sum()),
        "num_elements": value.numel(),
    }
