"""Ranks that are started once and reused: importing torch costs more than most tests.

`pool.run(3, "scenarios:train", path=…)` calls the function on ranks 0 to 2 of a fresh gloo group of three. A rank that
raised answers with its error; a rank that died or hung is a failure of the test, which prints where each rank was, and
the pool takes new ranks. Ranks are forks of one process that has imported torch (tests/rank_worker.py). The store that
they meet at is served by the pool itself: a file store is deleted by whichever rank leaves last by count, and a rank
that is slow to leave then waits for the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass
class _Rank:
    pid: int
    tasks: socket.socket
    received: bytearray = field(default_factory=bytearray)

    def send(self, task: dict[str, Any]) -> None:
        self.tasks.settimeout(None)
        self.tasks.sendall(json.dumps(task).encode() + b"\n")

    def read(self, rank: int, deadline: float) -> dict[str, Any]:
        while b"\n" not in self.received:
            self.tasks.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                more = self.tasks.recv(1 << 16)
            except TimeoutError:
                raise TimeoutError(f"rank {rank} did not answer in time; it hangs") from None
            if not more:
                raise RuntimeError(f"rank {rank} died")
            self.received += more
        line, _, rest = bytes(self.received).partition(b"\n")
        self.received = bytearray(rest)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has gone already
            os.kill(self.pid, number)


class RankPool:
    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._nursery: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
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
            self._ranks[rank].send(task)
        try:
            deadline = time.monotonic() + timeout_seconds
            return [self._ranks[rank].read(rank, deadline) for rank in range(world_size)]
        except BaseException:
            self._tell_where_they_are()
            self._end_ranks()
            raise

    def close(self) -> None:
        self._end_ranks()
        if self._orders is not None and self._nursery is not None:
            self._orders.close()
            self._nursery.kill()  # it would end by itself now, after tidying up all of torch
            self._nursery.wait()
        self._orders = self._nursery = self._store = None

    def _tell_where_they_are(self) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGUSR2)  # the worker's faulthandler writes every thread's stack
            time.sleep(0.2)  # one rank's stacks at a time; nothing tells when a stack has been written

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
            rank.tasks.close()
        self._ranks.clear()

    def _start(self) -> _Rank:
        if self._orders is None:
            self._orders = self._open_nursery()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._orders, [b"r"], [theirs.fileno()])
        pid = self._orders.recv(4)
        assert pid, "the nursery died; its error is above"
        return _Rank(int.from_bytes(pid, "big"), ours)

    def _open_nursery(self) -> socket.socket:
        paths = [str(HERE), str(HERE / "e2e"), os.environ.get("PYTHONPATH", "")]
        ours, theirs = socket.socketpair()
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, str(HERE / "rank_worker.py"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            )
        return ours
