"""Digests of a data file: XXH3-128 per block, so that any range can be verified alone, and SHA-256 over everything.

The first block is the file's head (the safetensors header, whatever its size); the others start after it, so that
tensors of round sizes lie on block boundaries and a slice of them costs no byte more than it has.
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

BLOCK_BYTES: Final = 256 * 2**10
"""What a slice may cost more than it has, at each of its ends; 128 KiB of digests a GiB."""
_BLOCKS_AT_ONCE: Final = 16
"""Written, and read, together: system calls and threads cost nothing then."""
_DIGEST_HEX: Final = 32
_CACHED_BLOCKS: Final = 16
"""Neighbouring tensors share blocks; this many are remembered, so that none of those is read twice."""

_DIGESTS_IN_FLIGHT: Final = 4
"""Bounds what the digests may lag behind: gathered units wait in memory for them."""


@dataclass(slots=True)
class ReadAccount:
    """Bytes that were asked for, read from storage and verified: what a partial load really cost."""

    wanted_bytes: int = 0
    read_bytes: int = 0
    verified_bytes: int = 0


class BlockWriter:
    """Writes a stream in units of whole blocks and keeps the digests; small pieces are gathered, large never copied.

    From the second unit on, digests are computed in a thread while the next unit is written: the memory given to
    `write` must stay unchanged until `digests` has returned. Use it as a context: leaving ends the thread.
    """

    def __init__(self, writer: Writer, head: bytes, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._writer = writer
        self._block_bytes = block_bytes
        self._unit_bytes = block_bytes * _BLOCKS_AT_ONCE
        self._rest = bytearray()
        self._sha256 = hashlib.sha256(head)
        self._blocks = [xxhash.xxh3_128_hexdigest(head)]
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[Future[None]] = deque()
        self._num_units = 0
        self.num_bytes = len(head)
        writer.write(head)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.num_bytes += len(view)
        if self._rest:
            taken = min(len(view), self._unit_bytes - len(self._rest))
            self._rest += view[:taken]
            view = view[taken:]
            if len(self._rest) < self._unit_bytes:
                return
            self._emit(memoryview(bytes(self._rest)))
            self._rest.clear()
        full = len(view) - len(view) % self._unit_bytes
        for start in range(0, full, self._unit_bytes):
            self._emit(view[start : start + self._unit_bytes])
        self._rest += view[full:]

    def finish(self) -> None:
        """Writes what is left. The file can be published now: its last digests are computed meanwhile."""
        if self._rest:
            self._emit(memoryview(bytes(self._rest)))
            self._rest.clear()

    def digests(self) -> tuple[str, str]:
        """After `finish`: (SHA-256 of the file, its block digests in one string)."""
        assert not self._rest, "digests before finish"
        while self._running:
            self._running.popleft().result()
        return self._sha256.hexdigest(), "".join(self._blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _emit(self, unit: memoryview) -> None:
        self._num_units += 1
        if self._num_units == 1:
            self._digest(unit)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
            if len(self._running) >= _DIGESTS_IN_FLIGHT:
                self._running.popleft().result()
            self._running.append(self._pool.submit(self._digest, unit))
        self._writer.write(unit)

    def _digest(self, unit: memoryview) -> None:
        for start in range(0, len(unit), self._block_bytes):
            self._blocks.append(xxhash.xxh3_128_hexdigest(unit[start : start + self._block_bytes]))
        self._sha256.update(unit)


class BlockReader:
    """Reads any range of one data file, in whole blocks, each verified before a byte of it is handed out."""

    def __init__(self, reader: Reader, file: DataFile, *, where: str, account: ReadAccount) -> None:
        if file.head_bytes > file.num_bytes:
            raise DamagedError(f"{where}: a head of {file.head_bytes} bytes in a file of {file.num_bytes}")
        expected = num_blocks(file)
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
        self._verify_head()

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the verified bytes from `start` on; DamagedError when they are not what was written.

        After an error `target` may hold bytes that were not verified: give it memory of your own, not the user's.
        """
        end = start + len(target)
        head, size = self._file.head_bytes, self._file.block_bytes
        if start < head or end > self._file.num_bytes:
            raise DamagedError(
                f"{self._where}: bytes {start} to {end} lie outside its data, {head} to {self.num_bytes}"
            )
        self._account.wanted_bytes += len(target)
        position = start
        while position < end:
            number, within = divmod(position - head, size)
            whole_blocks = 0 if within else min((end - position) // size, _BLOCKS_AT_ONCE)
            if whole_blocks:
                count = whole_blocks * size
                self._read_blocks(number, target[position - start : position - start + count])
            else:
                block = self._cached(number)
                count = min(end - position, len(block) - within)
                target[position - start : position - start + count] = block[within : within + count]
            position += count

    def close(self) -> None:
        self._cache.clear()
        self._reader.close()

    def _cached(self, number: int) -> memoryview:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        first = self._file.head_bytes + number * self._file.block_bytes
        size = min(self._file.block_bytes, self._file.num_bytes - first)
        reused = self._cache.popitem(last=False)[1] if len(self._cache) >= _CACHED_BLOCKS else None
        block = reused if reused is not None and len(reused) == size else memoryview(bytearray(size))
        self._read_blocks(number, block)
        self._cache[number] = block
        return block

    def _read_blocks(self, number: int, target: memoryview) -> None:
        """Reads and verifies block `number` (counted after the head) and those after it, as many as `target` holds."""
        size = self._file.block_bytes
        first = self._file.head_bytes + number * size
        self._reader.read_into(first, target)
        self._account.read_bytes += len(target)
        for start in range(0, len(target), size):
            block = target[start : start + size]
            self._check(1 + number + start // size, xxhash.xxh3_128_hexdigest(block), first + start, len(block))
        self._account.verified_bytes += len(target)

    def _verify_head(self) -> None:
        digest = xxhash.xxh3_128()
        piece = memoryview(bytearray(min(self._file.head_bytes, self._file.block_bytes)))
        for start in range(0, self._file.head_bytes, self._file.block_bytes):
            part = piece[: min(len(piece), self._file.head_bytes - start)]
            self._reader.read_into(start, part)
            digest.update(part)
        self._check(0, digest.hexdigest(), 0, self._file.head_bytes)

    def _check(self, number: int, found: str, first: int, size: int) -> None:
        wanted = self._file.blocks[number * _DIGEST_HEX : (number + 1) * _DIGEST_HEX]
        if found != wanted:
            raise DamagedError(
                f"{self._where}: bytes {first} to {first + size} have digest {found}, {wanted} was written; "
                f"the file is damaged"
            )


def num_blocks(file: DataFile) -> int:
    """The head, and the blocks after it."""
    return 1 + -(-(file.num_bytes - file.head_bytes) // file.block_bytes)
