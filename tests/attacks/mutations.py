"""Random damage to the files of a checkpoint, each kind with the seed that repeats it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, Final

Damage = Callable[[bytes, random.Random, list[bytes]], bytes]


def _flip(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def _replace(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(min(draw.randrange(1, 9), len(data) - at)) + data[at + 8 :]


def _cut(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    return data[: draw.randrange(len(data))]


def _drop(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.randrange(1, 17) :]


def _insert(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:]


def _insert_blank(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice([b" ", b"\n", b"\t", b"\x00"]) + data[at:]


def _digit(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    at = draw.choice(digits) if digits else draw.randrange(len(data))
    return data[:at] + bytes([48 + draw.randrange(10)]) + data[at + 1 :]


def _move(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    a, b = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:a] + data[b:] + data[a:b]


def _double(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    a, b = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:b] + data[a:b] + data[b:]


def _zeros(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + bytes(b - a) + data[b:]


def _swap(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    return draw.choice(others)


def _nothing(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    return b""


def _header(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """The length that a safetensors file begins with: giant, negative, one too many."""
    size = int.from_bytes(data[:8], "little")
    wanted = draw.choice([2**40, 2**63, 2**64 - 1, size + 1, size - 1, 0])
    return (wanted % 2**64).to_bytes(8, "little") + data[8:]


def _number(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """A number in the text becomes none, negative, giant, or one that another reader would take for the same."""
    numbers = list(re.finditer(rb"(?<=[\[:,])-?[0-9]+(?=[\],}])", data))
    if not numbers:
        return data
    found = draw.choice(numbers)
    old = found.group()
    words = [b"NaN", b"Infinity", b"-1", b"-" + old, b"1e999", b"9" * 40, b"9" * 5000, old + b".0", b"0" + old, b"true"]
    return data[: found.start()] + draw.choice(words) + data[found.end() :]


def _name(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    return data.replace(b"rank-0", draw.choice([b"../../", b"/etc/p", b"rank-1", b"RANK-0", b"rank\x00"]), 1)


def _deep(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at, depth = draw.randrange(len(data)), draw.choice([100, 5000])
    return data[:at] + b"[" * depth + b"]" * depth + data[at:]


def _spelling(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Means the same to any JSON reader, but is not how we write it."""
    try:
        tree = json.loads(data)
    except ValueError:
        return data
    ways: list[dict[str, Any]] = [{"indent": 1}, {"separators": (", ", ": ")}, {"sort_keys": False}]
    return json.dumps(tree, **{"separators": (",", ":"), "ensure_ascii": False} | draw.choice(ways)).encode()


KINDS: Final[list[Damage]] = [
    _flip, _flip, _replace, _cut, _drop, _insert, _insert_blank, _digit, _move, _double, _zeros, _swap, _nothing,
    _header, _number, _number, _name, _deep, _spelling,
]  # fmt: skip


def damaged(data: bytes, seed: int, others: list[bytes]) -> bytes | None:
    """`data` with one or two kinds of damage, None when the file is gone; may by chance be what it was."""
    draw = random.Random(seed)
    if draw.randrange(50) == 0:
        return None
    for _ in range(draw.choice([1, 1, 1, 2])):
        if data:
            data = draw.choice(KINDS)(data, draw, others)
    return data
