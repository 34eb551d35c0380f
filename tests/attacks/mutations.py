"""Random damage to the files of a checkpoint, each kind with the seed that repeats it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

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


KINDS: Final[list[Damage]] = [
    _flip, _flip, _replace, _cut, _drop, _insert, _insert_blank, _digit, _move, _double, _zeros, _swap, _nothing,
]  # fmt: skip


def damaged(data: bytes, seed: int, others: list[bytes]) -> bytes:
    """`data` with one or two kinds of damage; may by chance be what it was."""
    draw = random.Random(seed)
    for _ in range(draw.choice([1, 1, 1, 2])):
        if data:
            data = draw.choice(KINDS)(data, draw, others)
    return data
