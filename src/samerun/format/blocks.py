"""Digests of a data file: XXH3-128 per block, so that any range can be verified alone, and SHA-256 over everything.

XXH3-128 finds accidents (cut, flipped, swapped bytes) at memory speed. It is reached only through the chain manifest →
SHA-256 of the index → block digests, so a block cannot be replaced without replacing the index and the manifest.
Source: XXH3, https://github.com/Cyan4973/xxHash
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import xxhash

from samerun.errors import DamagedError

if TYPE_CHECKING:
    from samerun.format.schema import DataFile
    from samerun.storage.api import Reader, Writer

BLOCK_BYTES: Final = 4 * 2**20
_DIGEST_HEX: Final = 32
_CACHED_BLOCKS: Final = 4
"""Neighbouring tensors share blocks; this many are remembered, so that none of those is read twice."""

_DIGESTS_IN_FLIGHT: Final = 4
"""Bounds what the digests may lag behind: gathered blocks wait in memory for them."""


@dataclass(slots=True)
class ReadAccount:
    """Bytes that were asked for, read from storage and verified: what a partial load really cost."""

    wanted_bytes: int = 0
    read_bytes: int = 0
    verified_bytes: int = 0


class BlockWriter:
    """Writes a stream in whole blocks and keeps the digests: small pieces are gathered, large ones never copied.

    From the second block on, digests are computed in a thread while the next block is written. The memory given to
    `write` must therefore stay unchanged until `finish` has returned. Use it as a context: leaving ends the thread.
    """

    def __init__(self, writer: Writer, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._writer = writer
        self._block_bytes = block_bytes
        self._rest = bytearray()
        self._sha256 = hashlib.sha256()
        self._blocks: list[str] = []
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[Future[None]] = deque()
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
        while self._running:
            self._running.popleft().result()
        return self._sha256.hexdigest(), "".join(self._blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _emit(self, block: memoryview) -> None:
        if self._pool is None and not self._blocks:
            self._digest(block)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
            if len(self._running) >= _DIGESTS_IN_FLIGHT:
                self._running.popleft().result()
            self._running.append(self._pool.submit(self._digest, block))
        self._writer.write(block)

    def _digest(self, block: memoryview) -> None:
        self._blocks.append(xxhash.xxh3_128_hexdigest(block))
        self._sha256.update(block)


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
        """Fills `target` with the verified bytes from `start` on; DamagedError when they are not what was written.

        After an error `target` may hold bytes that were not verified: give it memory of your own, not the user's.
        """
        end = start + len(target)
        if end > self._file.num_bytes:
            raise DamagedError(f"{self._where}: bytes {start} to {end} lie outside its {self._file.num_bytes} bytes")
        self._account.wanted_bytes += len(target)
        size = self._file.block_bytes
        for number in range(start // size, -(-end // size)):
            first = number * size
            if start <= first and first + size <= end:
                self._read_block(number, target[first - start : first - start + size])
                continue
            block = self._cached(number)
            low, high = max(start, first), min(end, first + len(block))
            target[low - start : high - start] = block[low - first : high - first]

    def close(self) -> None:
        self._cache.clear()
        self._reader.close()

    def _cached(self, number: int) -> memoryview:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        size = min(self._file.block_bytes, self._file.num_bytes - number * self._file.block_bytes)
        reused = self._cache.popitem(last=False)[1] if len(self._cache) >= _CACHED_BLOCKS else None
        block = reused if reused is not None and len(reused) == size else memoryview(bytearray(size))
        self._read_block(number, block)
        self._cache[number] = block
        return block

    def _read_block(self, number: int, block: memoryview) -> None:
        first = number * self._file.block_bytes
        self._reader.read_into(first, block)
        self._account.read_bytes += len(block)
        found = xxhash.xxh3_128_hexdigest(block)
        wanted = self._file.blocks[number * _DIGEST_HEX : (number + 1) * _DIGEST_HEX]
        if found != wanted:
            raise DamagedError(
                f"{self._where}: bytes {first} to {first + len(block)} have digest {found}, {wanted} was written; "
                f"the file is damaged"
            )
        self._account.verified_bytes += len(block)
