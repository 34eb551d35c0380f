"""Trees of plain values and tensors, as `state_dict()` methods return them, split into plain state and named tensors.

In the plain part a tensor is the marker `{"__tensor__": key}`; with `host` when it lives on the CPU although its `home`
(its parameter) does not. A dict of the user's that has that key is refused, so a marker is never ambiguous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from samerun.core.component import Plain
from samerun.errors import UsageError

_MARKER: Final = "__tensor__"
_ARRAY: Final = "array"
_HOST: Final = "host"
_CPU: Final = torch.device("cpu")


def split_tree(value: Any, *, path: str, home: torch.device = _CPU) -> tuple[Plain, dict[str, torch.Tensor]]:
    """The plain part of `value` and its tensors by key (the path of dict keys and list positions, joined by '.').

    numpy arrays travel as tensors and come back as arrays. Raises UsageError naming the path of anything that is
    neither plain nor a tensor: such state would need code to come back.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = _split(value, path, tensors, home)
    return plain, tensors


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor], home: torch.device) -> Plain:
    if isinstance(value, torch.Tensor):
        return _mark(value, path, tensors, home)
    if isinstance(value, np.ndarray) and value.dtype != object:
        marker = _mark(torch.from_numpy(value.copy()), path, tensors, _CPU)
        assert isinstance(marker, dict)
        return {**marker, _ARRAY: True}
    if isinstance(value, np.generic):
        return _split(value.item(), path, tensors, home)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Counter):
        return value
    if isinstance(value, dict):
        if _MARKER in value:
            raise UsageError(f"{path}: the key {_MARKER!r} is reserved")
        for key in value:
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise UsageError(f"{path}: dict keys must be strings or integers, found {type(key).__name__} {key!r}")
        return {key: _split(item, _join(path, key), tensors, home) for key, item in value.items()}
    if isinstance(value, list):
        return [_split(item, _join(path, position), tensors, home) for position, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_split(item, _join(path, position), tensors, home) for position, item in enumerate(value))
    raise UsageError(
        f"{path or 'state'}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved without running "
        f"code to load it; return tensors, numbers, strings, bytes, lists, tuples and dicts from state_dict()"
    )


def join_tree(plain: Plain, load: Callable[[str, bool], torch.Tensor]) -> Any:
    """The tree back again; `load(key, host)` gives the tensor of a marker."""
    if isinstance(plain, Counter):
        return Counter(plain)
    if isinstance(plain, dict):
        if _MARKER in plain:
            tensor = load(str(plain[_MARKER]), bool(plain.get(_HOST, False)))
            return tensor.numpy().copy() if plain.get(_ARRAY) else tensor
        return {key: join_tree(item, load) for key, item in plain.items()}
    if isinstance(plain, list):
        return [join_tree(item, load) for item in plain]
    if isinstance(plain, tuple):
        return tuple(join_tree(item, load) for item in plain)
    return plain


def _mark(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], home: torch.device) -> Plain:
    if path in tensors:
        raise UsageError(f"{path}: two entries have this path; keys that differ only by dots or by int and str collide")
    tensors[path] = tensor.detach()
    marker: dict[str | int, Plain] = {_MARKER: path}
    if tensor.device.type == "cpu" and home.type != "cpu":
        marker[_HOST] = True
    return marker


def _join(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)
