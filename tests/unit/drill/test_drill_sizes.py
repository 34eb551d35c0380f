"""How large a difference is at the end, damage on purpose, and processes that certainly end."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import torch

from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.drill.damage import flip_one_byte_of_newest
from samerun.drill.processes import run_once
from samerun.drill.traces import First, Line
from samerun.drill.verdict import compare


def save(path: Path, tensor: torch.Tensor) -> str:
    captured = Captured(tensors={"w": tensor, "n": torch.arange(3)})
    return Store(path).save({"weights": captured}, Progress(), facts={}).result().name


def line(digest: str) -> Line:
    return Line(kind="edge", attempt=1, rank=0, window=3, update=3, held={"weights": {"w": digest}}, saved=None)


def test_a_tensors_difference_is_the_largest_elements_at_the_end(tmp_path: Path) -> None:
    one = torch.zeros(7, 13)
    other = one.clone()
    other[3, 5], other[6, 12] = 0.25, -0.5
    save(tmp_path / "one", one)
    save(tmp_path / "other", other)
    paths = {"twin_path": str(tmp_path / "one"), "other_path": str(tmp_path / "other")}
    verdict = compare([line("xa")], [line("xb")], **paths)
    assert verdict.components == {"weights": First(update=3, rank=0, key="w", size=0.5)}


def test_tensors_of_another_shape_have_no_size(tmp_path: Path) -> None:
    save(tmp_path / "one", torch.zeros(7))
    save(tmp_path / "other", torch.zeros(8))
    paths = {"twin_path": str(tmp_path / "one"), "other_path": str(tmp_path / "other")}
    assert compare([line("xa")], [line("xb")], **paths).components["weights"] == First(
        update=3, rank=0, key="w", size=None
    )


def test_equal_traces_read_no_checkpoint(tmp_path: Path) -> None:
    paths = {"twin_path": str(tmp_path / "none"), "other_path": str(tmp_path / "none")}
    assert compare([line("xa")], [line("xa")], **paths).same
    assert not (tmp_path / "none").exists()


def test_damage_changes_one_byte_of_the_newest_and_says_so(tmp_path: Path) -> None:
    older, newest = save(tmp_path, torch.zeros(7)), save(tmp_path, torch.ones(7))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = flip_one_byte_of_newest(tmp_path)
    changed = {path: path.read_bytes() for path, data in files.items() if path.read_bytes() != data}
    (path,) = changed
    assert path == tmp_path / "checkpoints" / newest / "rank-00000.safetensors"
    assert sum(a != b for a, b in zip(files[path], changed[path], strict=True)) == 1
    assert newest in said and older not in said


def run(code: str, log: Path, *, timeout_seconds: float = 60.0) -> tuple[int | None, str]:
    end = run_once([sys.executable, "-c", code], environ={"MARK": "seen"}, log=log, timeout_seconds=timeout_seconds)
    return end.exit_code, end.tail()


def test_a_command_runs_with_its_environment_and_its_output_is_kept(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['MARK']); print('err', file=sys.stderr); sys.exit(7)"
    exit_code, tail = run(code, tmp_path / "log")
    assert (exit_code, sorted(tail.splitlines())) == (7, ["err", "seen"])


def test_a_killed_command_ends_with_its_signal(tmp_path: Path) -> None:
    assert run("import os; os.kill(os.getpid(), 9)", tmp_path / "log")[0] == -signal.SIGKILL


def test_a_command_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    log, polls = tmp_path / "log", []
    end = run_once(
        [sys.executable, "-c", code], environ={}, log=log, timeout_seconds=5.0, on_poll=lambda: polls.append(1)
    )
    assert end.exit_code is None
    assert polls
    assert _is_gone(int(end.tail()))


def test_an_orphan_of_a_dead_command_goes_too(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)"
    )
    exit_code, tail = run(code, tmp_path / "log")
    assert exit_code == 0
    assert _is_gone(int(tail))


def test_an_orphan_may_be_given_time_to_end_by_itself(tmp_path: Path) -> None:
    left = "import os, sys; os.read(0, 1); open(sys.argv[1], 'w').close()"  # ends once its parent's pipe is closed
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {left!r}, sys.argv[1]], stdin=subprocess.PIPE,\n"
        "                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ended")]
    end = run_once(command, environ={}, log=tmp_path / "log", timeout_seconds=60, linger_seconds=60)
    assert (end.exit_code, end.num_left) == (0, 0)
    assert (tmp_path / "ended").exists()


def _is_gone(pid: int) -> bool:
    """Waits for the end of a process that is no child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20.0)[0])
    finally:
        os.close(descriptor)
