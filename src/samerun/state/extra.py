"""The user's own components: anything with `state_dict` and `load_state_dict` (an EMA, a replay buffer, a tokenizer's
counters). Each rank's own state is kept; where all ranks hold the same bytes they are stored once."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samerun.core.component import Captured, Source
from samerun.errors import MismatchError
from samerun.state.tree import join_tree, split_tree


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Extra:
    def __init__(self, name: str, value: Stateful) -> None:
        self.name = name
        self._value = value

    def capture(self) -> Captured:
        plain, tensors = split_tree(self._value.state_dict(), path="")
        return Captured(
            plain=plain,
            tensors={key: tensor for key, tensor in tensors.items() if isinstance(tensor, DTensor)},
            rank_tensors={key: tensor for key, tensor in tensors.items() if not isinstance(tensor, DTensor)},
        )

    def restore(self, source: Source) -> None:
        live = split_tree(self._value.state_dict(), path="")[1]

        def load(key: str, host: bool) -> torch.Tensor:
            if key not in source.specs:
                raise MismatchError(f"{self.name}: the checkpoint names {key} but holds no tensor of that name")
            spec, like = source.specs[key], live.get(key)
            target: torch.Tensor
            if like is not None and tuple(like.shape) == spec.shape:
                target = torch.zeros_like(like, dtype=spec.dtype, requires_grad=False)
            else:
                target = torch.zeros(spec.shape, dtype=spec.dtype)
            source.read_into(key, target)
            return target

        state = join_tree(source.plain, load)
        if not isinstance(state, dict):
            raise MismatchError(f"{self.name}: state_dict() was a {type(state).__name__}, expected a dict")
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        outcome = self._value.load_state_dict(state)
        if isinstance(self._value, nn.Module) and outcome is not None and any(outcome):
            raise MismatchError(f"{self.name}: load_state_dict reports {outcome}")
