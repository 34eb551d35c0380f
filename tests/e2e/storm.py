"""A run of several ranks that is struck again and again: `python storm.py kill|term FOLDER NUM_RANKS NUM_BLOWS`.

Ranks are forked from this process, which has torch imported and has started no thread of it: a start then costs tenths
of a second. FOLDER keeps the count, so that a storm that was cut off goes on where it was. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import scenarios
import torch
import torch.distributed as dist

from samerun.errors import ExitCode, Stop
from samerun.run.faults import FaultPlan

WINDOWS_A_BLOW = 12
"""The run is that long for each blow; a blow comes after up to so many windows of a start."""
PATIENCE_SECONDS = 120.0
PATIENCE_SECONDS_A_WINDOW = 0.5


class Ranks:
    """One start: each rank a child of this process."""

    def __init__(self, folder: Path, name: str, *, num_ranks: int, until: int) -> None:
        self.trace = folder / f"{name}-trace"
        self.began = self.num_lines()
        meeting = folder / f"meeting-{time.monotonic_ns()}"
        self.alive = {}
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, num_ranks, meeting, folder / name, self.trace, until)
            self.alive[rank] = pid
        self.codes: dict[int, int] = {}

    def num_lines(self) -> int:
        files = self.trace.glob("attempt-*.rank-00000.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    def reap(self) -> None:
        for rank, pid in list(self.alive.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                del self.alive[rank]

    def wait(self, *, lines: int | None = None, windows: int = 0) -> bool:
        """Until all have ended, or rank 0 has passed so many edges in this start; False when neither comes.

        `windows`: how many there are to do before the end, for the time to wait.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS + windows * PATIENCE_SECONDS_A_WINDOW
        while time.monotonic() < deadline:
            self.reap()
            if not self.alive or (lines is not None and self.num_lines() - self.began >= lines):
                return True
            time.sleep(0.002)
        return False

    def strike(self, rank: int, number: int) -> None:
        if rank in self.alive:
            os.kill(self.alive[rank], number)

    def kill(self) -> None:
        for rank in list(self.alive):
            self.strike(rank, signal.SIGKILL)
        self.wait()


def _be_rank(rank: int, num_ranks: int, meeting: Path, run: Path, trace: Path, until: int) -> None:
    """The child. Never returns."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "SAMERUN_FAULTS": FaultPlan(trace=trace).to_text(),
    }  # fmt: skip
    code = int(ExitCode.FAILED)
    try:
        log = os.open(run.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
        scenarios.train(str(run), wrap="ddp", until=until, longest=until + 1, keep_last=3)
        code = int(ExitCode.DONE)
    except Stop as stop:
        code = int(stop.exit_code)
    except BaseException:  # noqa: BLE001  # a forked child must never run on in its parent's program
        traceback.print_exc()
    finally:
        os._exit(code)


def storm(kind: str, folder: Path, num_ranks: int, num_blows: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    until, counter = WINDOWS_A_BLOW * num_blows, folder / "blows.json"
    done = json.loads(counter.read_text()) if counter.exists() else {"blows": 0, "seconds": 0.0, "odd": []}
    if not (folder / "twin-done").exists():
        twin = Ranks(folder, "twin", num_ranks=num_ranks, until=until)
        assert twin.wait(windows=until) and set(twin.codes.values()) == {0}, (folder / "twin.log").read_text()[-2000:]
        (folder / "twin-done").touch()
    while done["blows"] < num_blows:
        began = time.monotonic()
        draws = random.Random(f"{kind} {done['blows']}")
        ranks = Ranks(folder, "run", num_ranks=num_ranks, until=until)
        struck = draws.randrange(num_ranks)
        came = ranks.wait(lines=draws.randint(1 if kind == "term" else 0, WINDOWS_A_BLOW))
        if not ranks.alive:
            break  # it is done
        time.sleep(draws.uniform(0.0, 0.02))
        ranks.strike(struck, signal.SIGTERM if kind == "term" else signal.SIGKILL)
        if kind == "term":
            came = ranks.wait() and came
            if not came or set(ranks.codes.values()) not in ({int(ExitCode.STOPPED)}, {0}):
                done["odd"].append({"blow": done["blows"], "codes": ranks.codes, "came": came})
        ranks.kill()
        done["blows"] += 1
        done["seconds"] += time.monotonic() - began
        counter.write_text(json.dumps(done))
    last = Ranks(folder, "run", num_ranks=num_ranks, until=until)
    ended = last.wait(windows=until)
    last.kill()
    return {**done, "ended": ended, "codes": last.codes}


if __name__ == "__main__":
    print(json.dumps(storm(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
