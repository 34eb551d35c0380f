"""Reading any box of any chunk: the right elements, only the blocks it needs, memory within the stated bound."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.checkpoint.load import reading
from samerun.checkpoint.load.reading import CARRIERS, read_chunk
from samerun.errors import DamagedError
from samerun.format.blocks import BlockReader, BlockWriter, ReadAccount
from samerun.format.layout import Box
from samerun.format.schema import DataFile
from samerun.storage.memory import Memory

BLOCK_BYTES = 4096


HEAD = b"head, of no round size"


def stored(data: bytes) -> tuple[BlockReader, ReadAccount]:
    """A reader of a file that holds HEAD and then `data`."""
    storage, account = Memory(), ReadAccount()
    with storage.writer("x") as writer, BlockWriter(writer, HEAD, block_bytes=BLOCK_BYTES) as blocks:
        for start in range(0, len(data), 777):
            blocks.write(data[start : start + 777])
        blocks.finish()
        writer.publish()
        sha256, digests = blocks.digests()
    assert storage.objects["x"] == HEAD + data
    assert sha256 == hashlib.sha256(HEAD + data).hexdigest()
    parts = [HEAD, *(data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES))]
    assert digests == "".join(map(xxhash.xxh3_128_hexdigest, parts))
    file = DataFile(
        name="rank-00000.safetensors",
        num_bytes=len(HEAD) + len(data),
        head_bytes=len(HEAD),
        block_bytes=BLOCK_BYTES,
        blocks=digests,
    )
    return BlockReader(storage.reader("x"), file, where="x", account=account), account


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=3)))
    spans = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    return shape, box, draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.integers(0, 5000))


@given(cases(), st.sampled_from([64, 5000, 2**25]))
@settings(max_examples=200)
def test_any_box_is_read_exactly(case: tuple[tuple[int, ...], Box, int, int], span_bytes: int) -> None:
    shape, box, item_bytes, head = case
    count = int(np.prod(shape)) * item_bytes
    raw = np.random.default_rng(count).integers(0, 256, count + head + 100, dtype=np.uint8)
    raw[head : head + count] = raw[head : head + count] & 63  # no NaN patterns: complex128 must compare
    full = raw[head : head + count].view(CARRIERS[item_bytes]).reshape(shape)
    blocks, account = stored(raw.tobytes())
    target = np.zeros(box.lengths, dtype=CARRIERS[item_bytes])
    filled = np.zeros(box.lengths, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "SPAN_BYTES", span_bytes)
        for part, array in read_chunk(blocks, len(HEAD) + head, shape, box, item_bytes):
            where = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.lengths, strict=True))
            target[where] = array
            filled[where] += 1
    wanted = full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
    assert np.array_equal(target, wanted)
    assert (filled == 1).all()
    assert account.read_bytes == account.verified_bytes


def test_rows_of_a_tall_matrix_cost_their_blocks_only() -> None:
    rows, columns = 64, 8192
    data = np.arange(rows * columns, dtype=np.int32)
    blocks, account = stored(data.tobytes())
    list(read_chunk(blocks, len(HEAD), (rows, columns), Box((10, 0), (3, columns)), 4))
    assert account.read_bytes == 3 * columns * 4, "rows of a round size lie on blocks"


def test_narrow_columns_of_wide_rows_leave_the_gaps_unread() -> None:
    rows, columns = 16, 65536
    data = np.arange(rows * columns, dtype=np.int32)
    blocks, account = stored(data.tobytes())
    parts = list(read_chunk(blocks, len(HEAD), (rows, columns), Box((0, 100), (rows, 10)), 4))
    assert len(parts) == rows
    assert account.read_bytes <= rows * 2 * BLOCK_BYTES
    assert account.wanted_bytes == rows * 10 * 4


def test_bytes_of_the_head_and_beyond_the_end_are_no_data() -> None:
    blocks, _ = stored(bytes(100))
    for start, length in ((0, 8), (len(HEAD) - 1, 1), (len(HEAD) + 100, 1), (len(HEAD), 101)):
        with pytest.raises(DamagedError, match="outside its data"):
            blocks.read_into(start, memoryview(bytearray(length)))
