"""Plain state as JSON and back, losing nothing: order of keys, int keys, tuples, non-finite floats, bytes, Counters.

What JSON can say exactly is written as it is; the rest is an object with one key that starts with '$':
    {"$dict": [[key, value], …]}   keys that are ints, start with '$', or are not in sorted order (order is kept)
    {"$tuple": […]}  {"$counter": [[key, count], …]}  {"$bytes": base64}  {"$float": "inf" | "-inf" | 16 hex digits}
Each value has exactly one spelling; any other is refused. Classes are refused by path: nothing is ever imported.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, cast

from samerun.core.component import Plain
from samerun.errors import SchemaError, UsageError

MAX_DEPTH: Final = 40
"""JSON levels of one component's plain state, below what canonical JSON accepts for a document."""
MAX_INT_BITS: Final = 8192


def encode_plain(value: Plain, path: str) -> Any:
    """`value` as a JSON tree; UsageError naming the path of whatever is not plain."""
    return _encode(value, path, MAX_DEPTH)


def decode_plain(value: Any, where: str) -> Plain:
    """The plain value that a JSON tree stands for; SchemaError on an unknown tag or a second spelling."""
    decoded: Plain = _decode(value, where)
    try:
        again = encode_plain(decoded, where)
    except UsageError as error:
        raise SchemaError(f"{where}: {error}") from error
    if not _identical(again, value):
        raise SchemaError(f"{where}: plain state is not in its one canonical spelling")
    return decoded


def _encode(value: Any, path: str, depth: int) -> Any:
    if depth <= 0:
        raise UsageError(f"{path}: plain state is nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        if value.bit_length() > MAX_INT_BITS:
            raise UsageError(f"{path}: an int of {value.bit_length()} bits, at most {MAX_INT_BITS} are stored")
        return value
    if kind is str:
        return _checked_text(value, path)
    if kind is float:
        return value if math.isfinite(value) else {"$float": _float_word(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind is list:
        return [_encode(item, f"{path}[{i}]", depth - 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_encode(item, f"{path}[{i}]", depth - 2) for i, item in enumerate(value)]}
    if kind is Counter:
        return {"$counter": _encode_pairs(value, path, depth)}
    if kind is dict:
        return _encode_dict(value, path, depth)
    raise UsageError(
        f"{path}: {kind.__module__}.{kind.__qualname__} is not plain state; store None, bool, int, float, str, bytes, "
        f"list, tuple, dict or Counter (a NumPy or tensor scalar: its .item())"
    )


def _encode_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    keys = list(value)
    plain_keys = all(type(key) is str and not key.startswith("$") for key in keys)
    if plain_keys and keys == sorted(keys):
        return {_checked_text(key, path): _encode(item, f"{path}.{key}", depth - 1) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, path, depth)}


def _encode_pairs(value: dict[Any, Any], path: str, depth: int) -> list[Any]:
    for key in value:
        if type(key) not in (str, int):
            raise UsageError(f"{path}: a dict key of type {type(key).__qualname__}; only str and int are stored")
    return [[_encode(key, path, depth), _encode(item, f"{path}[{key!r}]", depth - 3)] for key, item in value.items()]


def _checked_text(value: str, path: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{path}: a string with lone surrogates cannot be stored; store its bytes") from error
    return value


def _float_word(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return struct.pack(">d", value).hex()


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: _decode(item, where) for key, item in value.items()}
    if len(value) != 1 or tags[0] not in _DECODERS:
        raise SchemaError(f"{where}: unknown tag {tags[0]!r} in plain state")
    return _DECODERS[tags[0]](value[tags[0]], where)


def _decode_float(value: Any, where: str) -> float:
    if value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, str) and len(value) == 16:
        try:
            number = struct.unpack(">d", bytes.fromhex(value))[0]
        except ValueError as error:
            raise SchemaError(f"{where}: {value!r} is no float") from error
        return cast(float, number)
    raise SchemaError(f"{where}: {value!r} is no float")


def _decode_bytes(value: Any, where: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise SchemaError(f"{where}: bytes are not valid base64") from error


def _decode_tuple(value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise SchemaError(f"{where}: a tuple must be a list of values")
    return tuple(_decode(item, where) for item in value)


def _decode_dict(value: Any, where: str) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for pair in value if isinstance(value, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in result:
            raise SchemaError(f"{where}: a dict must be a list of [key, value] with different str or int keys")
        result[pair[0]] = _decode(pair[1], where)
    return result


def _decode_counter(value: Any, where: str) -> Counter[Any]:
    result: Counter[Any] = Counter()
    for key, item in _decode_dict(value, where).items():
        result[key] = item
    return result


def _identical(left: Any, right: Any) -> bool:
    """Equal as JSON: `True == 1 == 1.0` and `0.0 == -0.0` do not count as equal."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_identical, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_identical(left[key], right[key]) for key in left)
    return bool(left == right)


_DECODERS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "$float": _decode_float,
    "$bytes": _decode_bytes,
    "$tuple": _decode_tuple,
    "$dict": _decode_dict,
    "$counter": _decode_counter,
}
