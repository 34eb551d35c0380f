"""Ranks that are started once and reused: importing torch costs more than most tests.

`pool.run(3, "scenarios:train", path=…)` calls the function on ranks 0 to 2 of a fresh gloo group of three. A rank that
raised answers with its error; a rank that died or hung is a failure of the test, which prints where each rank was, and
the pool starts anew. The store that the ranks meet at is served by the pool itself: a file store is deleted by
whichever rank leaves last by count, and a rank that is slow to leave then waits for the file.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

HERE = Path(__file__).parent


class RankError(Exception):
    """What the first failing rank raised."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.rank = rank
        self.kind = kind
        self.text = text


class RankPool:
    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[str]] = []
        self._store: TCPStore | None = None
        self._num_tasks = 0

    def run(
        self,
        world_size: int,
        call: str,
        *,
        environ: Mapping[str, str] | None = None,
        timeout_seconds: float = 90,
        **arguments: Any,
    ) -> list[Any]:
        """The results in rank order; raises RankError if any rank raised."""
        answers = self.answers(world_size, call, environ=environ, timeout_seconds=timeout_seconds, **arguments)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankError(rank, answer["error"], answer["text"], answer["trace"])
        return [answer["result"] for answer in answers]

    def answers(
        self,
        world_size: int,
        call: str,
        *,
        environ: Mapping[str, str] | None = None,
        timeout_seconds: float = 90,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Each rank's answer: {"result": …} or {"error": …, "text": …, "trace": …}."""
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._ranks) < world_size:
            self._ranks.append(self._start())
        self._num_tasks += 1
        for rank in range(world_size):
            task = {
                "rank": rank,
                "world_size": world_size,
                "call": call,
                "arguments": arguments,
                "environ": dict(environ or {}),
                "store": {"port": self._store.port, "prefix": f"task-{self._num_tasks}"},
            }
            pipe = self._ranks[rank].stdin
            assert pipe is not None
            pipe.write(json.dumps(task) + "\n")
            pipe.flush()
        try:
            return [self._read(rank, time.monotonic() + timeout_seconds) for rank in range(world_size)]
        except BaseException:
            self._tell_where_they_are()
            self._end()
            raise

    def close(self) -> None:
        self._end()
        self._store = None

    def _tell_where_they_are(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR2)  # the worker's faulthandler writes every thread's stack
                time.sleep(0.2)  # one rank's stacks at a time; nothing tells when a stack has been written

    def _end(self) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._ranks.clear()

    def _read(self, rank: int, deadline: float) -> dict[str, Any]:
        pipe = self._ranks[rank].stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not answer in time; it hangs")
        line = pipe.readline()
        if not line:
            raise RuntimeError(f"rank {rank} died with code {self._ranks[rank].wait()}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        paths = [str(HERE), str(HERE / "e2e"), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, str(HERE / "rank_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )
