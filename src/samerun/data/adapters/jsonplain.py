"""A loader's own state as JSON and back, typed: tuples, bytes, integer keys, tensors and arrays survive.

Nothing is pickled; a class that is not in this list is refused by its path in the state. A mapping is written as such
only when its keys are strings that cannot be taken for a tag.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import Any

import numpy as np

from samerun.errors import UsageError


def encode(value: Any, path: str = "state") -> Any:
    """`value` as a JSON tree; raises UsageError naming `path` for a type that cannot be written."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) in (list, tuple):
        items = [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) is Counter:
        return {"$counter": _encode_dict(dict(value), path)}
    if isinstance(value, dict):
        return _encode_dict(value, path)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return {"$scalar": _encode_array(np.asarray(value), path)}
    if isinstance(value, np.ndarray):
        return {"$array": _encode_array(value, path)}
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        return _encode_tensor(value.detach().cpu(), path)
    raise UsageError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved without pickle; let "
        "state_dict() return numbers, strings, lists, dicts, bytes, arrays or tensors"
    )


def _encode_dict(value: dict[Any, Any], path: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
    return {"$items": [[encode(key, f"{path} key"), encode(item, f"{path}[{key!r}]")] for key, item in value.items()]}


def _encode_tensor(tensor: Any, path: str) -> Any:
    try:
        return {"$tensor": _encode_array(tensor.numpy(), path)}
    except TypeError:  # bfloat16 and others that NumPy does not know: their bytes, and torch's name for what they are
        import torch

        data = base64.b64encode(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {"$bits": {"dtype": str(tensor.dtype)[len("torch.") :], "shape": list(tensor.shape), "data": data}}


def _encode_array(array: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
    if array.dtype.hasobject or array.dtype.fields:
        raise UsageError(f"{path} is an array of {array.dtype}, which cannot be saved without pickle")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises UsageError for an unknown tag."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    body = value[tag]
    match tag:
        case "$float":
            return float(body)
        case "$tuple":
            return tuple(decode(item) for item in body)
        case "$items":
            return {decode(key): decode(item) for key, item in body}
        case "$bytes":
            return base64.b64decode(body, validate=True)
        case "$counter":
            return Counter(decode(body))
        case "$scalar":
            return _decode_array(body)[()]
        case "$array":
            return _decode_array(body)
        case "$tensor":
            import torch

            return torch.from_numpy(_decode_array(body))
        case "$bits":
            return _decode_bits(body)
        case _:
            raise UsageError(f"the loader's state has the unknown tag {tag!r}; it was written by a newer version")


def _decode_array(body: dict[str, Any]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(body["dtype"])
    if dtype.hasobject:
        raise UsageError(f"the loader's state has an array of {dtype}, which is never read")
    return np.frombuffer(base64.b64decode(body["data"], validate=True), dtype).reshape(body["shape"]).copy()


def _decode_bits(body: dict[str, Any]) -> Any:
    import torch

    dtype = getattr(torch, str(body["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"the loader's state has a tensor of {body['dtype']!r}, which this torch does not know")
    data = bytearray(base64.b64decode(body["data"], validate=True))
    if not data:  # which torch.frombuffer refuses
        return torch.empty(body["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(body["shape"])
