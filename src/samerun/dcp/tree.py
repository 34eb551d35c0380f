"""Nested state as DCP names it, without what its own flattening loses.

DCP turns int keys into strings, so a plain value under `state[0]` comes back under a new key "0" and the old one stays
stale; empty dicts vanish. Here a part of the tree without tensors is one value, kept whole in typed JSON, and a value
beside tensors keeps the path of real keys to where it is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from samerun.errors import UsageError

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor, or a part of the tree that holds none; `path` has the real keys, `key` is DCP's name of it."""

    key: str
    path: Path
    value: Any

    @property
    def is_tensor(self) -> bool:
        return is_tensor(self.value)

    def parts(self) -> Iterator[Leaf]:
        """One level down, for states that were saved value by value."""
        if isinstance(self.value, Mapping):
            yield from (_leaf((*self.path, key), value) for key, value in self.value.items())
        elif isinstance(self.value, list):
            yield from (_leaf((*self.path, _Position(number)), value) for number, value in enumerate(self.value))


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, ShardedTensor))


def leaves(state: Mapping[Any, Any]) -> dict[str, Leaf]:
    """Key → leaf. Dicts and lists with tensors in them are walked, everything else is a leaf."""
    found: dict[str, Leaf] = {}
    for leaf in _walk((), state, at_root=True):
        if leaf.key in found:
            raise UsageError(
                f"{leaf.key}: two entries have this name ({found[leaf.key].path} and {leaf.path}); keys "
                f"that differ only by dots or by int and str collide, rename one"
            )
        found[leaf.key] = leaf
    return found


def put(state: Any, path: Path, value: Any) -> None:
    """Puts `value` at `path` of the very objects that `state` is made of."""
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


def text_path(path: Path) -> tuple[str | int, ...]:
    """The path as DCP's own planners understand it: dict keys as text, positions in lists as ints."""
    return tuple(int(key) if isinstance(key, _Position) else str(key) for key in path)


class _Position(int):
    """A place in a list, to tell it from an int key of a dict."""


def _walk(path: Path, value: Any, *, at_root: bool = False) -> Iterator[Leaf]:
    if isinstance(value, Mapping) and (at_root or _holds_tensors(value)):
        for key, item in value.items():
            yield from _walk((*path, key), item)
    elif isinstance(value, list) and _holds_tensors(value):
        for number, item in enumerate(value):
            yield from _walk((*path, _Position(number)), item)
    else:
        yield _leaf(path, value)


def _leaf(path: Path, value: Any) -> Leaf:
    return Leaf(key=".".join(map(str, path)), path=path, value=value)


def _holds_tensors(value: Any) -> bool:
    """Whether tensors lie below that can be filled in place; a tuple is replaced whole, as DCP does."""
    if is_tensor(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, list) and any(map(_holds_tensors, value))
