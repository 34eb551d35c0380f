"""Digests of a data file: XXH3-128 per block, so that any range can be verified alone, and SHA-256 over everything.

XXH3-128 finds accidents (cut, flipped, swapped bytes) at memory speed. It is reached only through the chain manifest →
SHA-256 of the index → block digests, so a block cannot be replaced without replacing the index and the manifest.
Source: XXH3, https://github.com/Cyan4973/xxHash
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

from samerun.errors import DamagedError

if TYPE_CHECKING:
    from samerun.format.schema import DataFile
    from samerun.storage.api import Reader, Writer

BLOCK_BYTES: Final = 4 * 2**20
_DIGEST_HEX: Final = 32
_CACHED_BLOCKS: Final = 4
"""Neighbouring tensors share blocks; this many are remembered, so that none of those is read twice."""


@dataclass(slots=True)
class ReadAccount:
    """Bytes that were asked for, read from storage and verified: what a partial load really cost."""

    wanted_bytes: int = 0
    read_bytes: int = 0
    verified_bytes: int = 0


class BlockWriter:
    """Writes a stream in whole blocks and keeps the digests: small pieces are gathered, large ones never copied."""

    def __init__(self, writer: Writer, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._writer = writer
        self._block_bytes = block_bytes
        self._rest = bytearray()
        self._sha256 = hashlib.sha256()
        self._blocks: list[str] = []
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.num_bytes += len(view)
        if self._rest:
            taken = min(len(view), self._block_bytes - len(self._rest))
            self._rest += view[:taken]
            view = view[taken:]
            if len(self._rest) < self._block_bytes:
                return
            self._emit(memoryview(bytes(self._rest)))
            self._rest.clear()
        full = len(view) - len(view) % self._block_bytes
        for start in range(0, full, self._block_bytes):
            self._emit(view[start : start + self._block_bytes])
        self._rest += view[full:]

    def finish(self) -> tuple[str, str]:
        """Writes what is left; returns (SHA-256 of the file, its block digests in one string)."""
        if self._rest:
            self._emit(memoryview(bytes(self._rest)))
            self._rest.clear()
        return self._sha256.hexdigest(), "".join(self._blocks)

    def _emit(self, block: memoryview) -> None:
        self._blocks.append(xxhash.xxh3_128_hexdigest(block))
        self._sha256.update(block)
        self._writer.write(block)


class BlockReader:
    """Reads any range of one data file, in whole blocks, each verified before a byte of it is handed out."""

    def __init__(self, reader: Reader, file: DataFile, *, where: str, account: ReadAccount) -> None:
        expected = -(-file.num_bytes // file.block_bytes)
        if len(file.blocks) != expected * _DIGEST_HEX:
            raise DamagedError(f"{where}: {len(file.blocks) // _DIGEST_HEX} block digests for {expected} blocks")
        if reader.size_bytes != file.num_bytes:
            raise DamagedError(f"{where}: {reader.size_bytes} bytes, {file.num_bytes} were written; the file was cut")
        self._reader = reader
        self._file = file
        self._where = where
        self._account = account
        self._cache: OrderedDict[int, memoryview] = OrderedDict()
        self.block_bytes = file.block_bytes
        self.num_bytes = file.num_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the verified bytes from `start` on; DamagedError when they are not what was written."""
        end = start + len(target)
        if end > self._file.num_bytes:
            raise DamagedError(f"{self._where}: bytes {start} to {end} lie outside its {self._file.num_bytes} bytes")
        self._account.wanted_bytes += len(target)
        size = self._file.block_bytes
        for number in range(start // size, -(-end // size)):
            first = number * size
            block = self._block(number)
            low, high = max(start, first), min(end, first + len(block))
            target[low - start : high - start] = block[low - first : high - first]

    def close(self) -> None:
        self._cache.clear()
        self._reader.close()

    def _block(self, number: int) -> memoryview:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        first = number * self._file.block_bytes
        size = min(self._file.block_bytes, self._file.num_bytes - first)
        reused = self._cache.popitem(last=False)[1] if len(self._cache) >= _CACHED_BLOCKS else None
        block = reused if reused is not None and len(reused) == size else memoryview(bytearray(size))
        self._reader.read_into(first, block)
        self._account.read_bytes += size
        found = xxhash.xxh3_128_hexdigest(block)
        wanted = self._file.blocks[number * _DIGEST_HEX : (number + 1) * _DIGEST_HEX]
        if found != wanted:
            raise DamagedError(
                f"{self._where}: bytes {first} to {first + size} have digest {found}, {wanted} was written; "
                f"the file is damaged"
            )
        self._account.verified_bytes += size
        self._cache[number] = block
        return block
