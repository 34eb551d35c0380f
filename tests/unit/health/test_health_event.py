from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.health.records.event import FIELDS, MAX_LINE_BYTES, WindowRecord, header_line, read_records
from samerun.step.outcome import Reason
from unit.health.health_records import record

COUNTS = st.integers(0, 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
SECONDS = st.floats(0, 1e7)
RECORDS = st.builds(
    WindowRecord,
    window=COUNTS, start=COUNTS, end=COUNTS, coverage=st.integers(0, 2**64 - 1), samples=COUNTS, tokens=COUNTS,
    loss=FLOATS, grad_norm=FLOATS, lr=FLOATS, scale=FLOATS, outcome=st.sampled_from([r.value for r in Reason]),
    window_seconds=SECONDS, compute_seconds=SECONDS, wait_seconds=SECONDS, data_seconds=SECONDS, memory_bytes=COUNTS,
)  # fmt: skip


def as_float32(value: float) -> bytes:
    return struct.pack("f", value)


@given(RECORDS)
def test_any_record_is_short_and_comes_back(whole: WindowRecord) -> None:
    line = whole.to_line()
    assert len(line) <= MAX_LINE_BYTES
    back = WindowRecord.from_values(json.loads(line))
    for name in FIELDS:
        mine, theirs = getattr(whole, name), getattr(back, name)
        if name.endswith("_seconds"):
            assert theirs == pytest.approx(mine, abs=1e-6)  # whole microseconds
        elif isinstance(mine, float) and math.isnan(mine):
            assert math.isnan(theirs)
        elif isinstance(mine, float):
            assert as_float32(theirs) == as_float32(mine)  # nine digits tell every float32 apart
        else:
            assert theirs == mine


def test_a_jumping_clock_makes_no_negative_or_endless_time() -> None:
    values = json.loads(record(window_seconds=-5.0, data_seconds=1e30).to_line())
    assert values[FIELDS.index("window_seconds")] == 0
    assert values[FIELDS.index("data_seconds")] == 10**13


def test_a_file_with_cut_lines_gives_the_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    lines = [record(window=n).to_line() for n in range(3)]
    path.write_bytes(header_line(rank=0, attempt=2, facts={"host": "a"}) + lines[0] + lines[1][:40] + b"\n" + lines[2])
    found = read_records(path)
    assert [r.window for r in found.records] == [0, 2]
    assert found.num_unreadable == 1
    assert (found.head["rank"], found.head["attempt"], found.head["host"]) == (0, 2, "a")


@pytest.mark.parametrize("content", [b"", b"[]\n", b'{"schema": "other"}\n', b'{"schema": "samerun.windows.v1"}\n'])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="not a file of"):
        read_records(tmp_path / "x")


@pytest.mark.parametrize(("name", "value"), [("window", -1), ("loss", "much"), ("outcome", 3), ("wait_seconds", 0.5)])
def test_values_that_are_never_written_are_refused(name: str, value: object) -> None:
    values = json.loads(record().to_line())
    values[FIELDS.index(name)] = value
    with pytest.raises(ValueError, match=name):
        WindowRecord.from_values(values)


def test_number_of_fields_is_checked() -> None:
    with pytest.raises(ValueError, match="16 fields"):
        WindowRecord.from_values([1, 2])


def test_records_are_values() -> None:
    assert replace(record(), loss=2.25) == record()
