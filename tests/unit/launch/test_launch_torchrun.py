"""`samerun launch` keeps the codes that torchrun loses: real ranks that end in two of the ways. The demo sees the
others, and the table of test_launch_judge.py all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from samerun.core import environ
from samerun.errors import DoNotRestart, Refused
from samerun.run.ending import last_words

me, ends = environ.launcher(), sys.argv[1:]
how = ends[me.rank]
stop = {"refused": Refused, "fenced": DoNotRestart}[how](f"{how} by rank {me.rank}")
last_words.leave(me, stop)
raise stop
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (["refused", "refused"], 4, "refused by rank"),
        (["fenced"], 93, "fenced by rank 0"),
    ],
)
def test_each_end_has_its_code(tmp_path: Path, ends: list[str], code: int, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    end = subprocess.run(
        [sys.executable, "-m", "samerun.cli", "launch", "--nproc", str(len(ends)), str(script), *ends],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert end.returncode == code, end.stderr
    assert said in end.stderr
