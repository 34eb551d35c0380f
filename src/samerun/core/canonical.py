"""Canonical JSON: one value has exactly one spelling, so a file whose bytes changed in any way is refused.

Canonical here: UTF-8, keys sorted, no spaces, no duplicate keys, integers without leading zeros or exponents, floats in
their shortest round-trip form and always with a '.' or exponent, no NaN or infinities (those travel as typed tags, see
format/codec.py), one trailing newline. Decoding re-encodes and compares, so whatever the parser tolerates is refused
all the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from samerun.errors import SchemaError

MAX_DOCUMENT_BYTES: Final = 256 * 2**20
"""No JSON document of ours comes near this; a larger one is an attack or an accident."""
MAX_DEPTH: Final = 64

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def canonical_bytes(value: Any) -> bytes:
    """The one spelling of `value` (a JSON tree with finite floats). Raises ValueError on anything else."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="strict") + b"\n"


def decode_canonical(data: bytes, *, where: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Parses canonical JSON in bounded memory; raises SchemaError naming `where` for anything else."""
    if len(data) > max_bytes:
        raise SchemaError(f"{where}: {len(data)} bytes of JSON, at most {max_bytes} are accepted")
    if _depth_exceeds(data, MAX_DEPTH):
        raise SchemaError(f"{where}: JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        same = canonical_bytes(value) == data
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{where}: not valid JSON ({error})") from error
    if not same:
        raise SchemaError(f"{where}: valid JSON but not in canonical form; the file was edited or damaged")
    return value


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _depth_exceeds(data: bytes, limit: int) -> bool:
    """Brackets outside strings, counted without recursion: the parser itself would exhaust the stack."""
    depth = 0
    for byte in _STRING.sub(b"", data).translate(None, delete=_NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > limit:
            return True
    return False
