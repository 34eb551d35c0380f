"""One start of a training command in a session of its own, how it is interrupted, and its certain end.

Ranks of torchrun sit in sessions of their own and outlive their launcher, so the group of the command is not enough:
everything it starts inherits a token in its environment, and whatever still carries that token at the end is killed.
Where there is no /proc (not Linux) only the group is.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from samerun.drill.output import KeptOutput

_POLL_SECONDS: Final = 0.02
_GRACE_SECONDS: Final = 5.0
_STALL_SECONDS: Final = 2.0
_TOKEN_VARIABLE: Final = "SAMERUN_DRILL_TOKEN"
"""Marks processes, and changes nothing: nobody reads it but the sweep below."""


class Blow(Enum):
    KILL = "SIGKILL to every process"
    TERM = "SIGTERM to the process group"
    TERM_THEN_KILL = "SIGTERM to the process group, SIGKILL at once after it"
    TERM_RANK = "SIGTERM to one rank alone"
    """The highest RANK among its processes; the command itself where none has one."""
    KILL_MAIN = "SIGKILL to the command's own process alone"
    """A launcher, where there is one: what it started is orphaned."""
    STALL_THEN_KILL = "SIGSTOP for 2 s as a straggler, SIGCONT, SIGKILL 1 s later"


class Interruption(Protocol):
    """When and how a start is interrupted from outside."""

    blow: Blow

    def feed(self, data: bytes) -> None:
        """What the command prints, as it comes; called by another thread."""

    def is_due(self, seconds: float) -> bool:
        """Polled; `seconds` since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    exit_code: int | None
    """None: it did not end within its time and was killed."""
    seconds: float
    log: Path
    interrupted: bool = False
    """Whether the interruption came before its end."""
    ignored_term: bool = False
    """It was still there when its grace after SIGTERM was over, and was killed."""
    num_left: int = 0
    """Processes that it had left behind; they were killed."""

    def tail(self, num_lines: int = 15) -> str:
        """The last lines it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def run_once(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    log: Path,
    timeout_seconds: float,
    on_poll: Callable[[], None] = lambda: None,
    interruption: Interruption | None = None,
    grace_seconds: float = _GRACE_SECONDS,
    linger_seconds: float = 0.0,
    max_file_bytes: int | None = None,
) -> Ended:
    """Starts `command`, interrupts it when that is due, waits for its end, leaves no process behind, whatever happens.

    What it leaves behind has `linger_seconds` to end by itself before it is killed. `max_file_bytes`: writing beyond
    that fails with EFBIG, as on a full disk.
    The command has no terminal and reads nothing. Raises OSError where it cannot be started at all.
    """
    began = time.monotonic()
    token = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ, _TOKEN_VARIABLE: token},
        start_new_session=True,
    )
    assert process.stdout is not None
    if max_file_bytes is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    output = KeptOutput(process.stdout, log, interruption.feed if interruption else lambda data: None)
    left: list[int] = []
    with _ended_output(output), _ended_group(process, token, left):
        output.start()
        deadline = began + timeout_seconds
        hit, ignored = False, False
        poll_seconds = getattr(interruption, "poll_seconds", _POLL_SECONDS)
        while (code := process.poll()) is None and time.monotonic() < deadline:
            on_poll()
            if interruption is not None and not hit and interruption.is_due(time.monotonic() - began):
                hit = True
                ignored = _strike(process, token, interruption.blow, grace_seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(poll_seconds)
        _linger(token, linger_seconds)
    return Ended(
        exit_code=code,
        seconds=time.monotonic() - began,
        log=log,
        interrupted=hit,
        ignored_term=ignored,
        num_left=len(set(left)),
    )


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process by SystemExit meanwhile: by default what it has started would run on."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _strike(process: subprocess.Popen[bytes], token: str, blow: Blow, grace_seconds: float) -> bool:
    """True when SIGTERM was answered by nothing for the whole grace."""
    if blow is Blow.KILL_MAIN:
        process.kill()
        process.wait(_GRACE_SECONDS)
        return False
    if blow is Blow.STALL_THEN_KILL:
        _stall(process, token)
    elif blow is Blow.TERM_RANK:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_highest_rank(token) or process.pid, signal.SIGTERM)
    elif blow is not Blow.KILL:
        _signal_group(process, signal.SIGTERM)
    if blow in WARNINGS:
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            pass
        else:
            return False
    _kill_all(process, token)
    process.wait(_GRACE_SECONDS)
    return blow in WARNINGS


WARNINGS: Final = frozenset({Blow.TERM, Blow.TERM_RANK})
"""Blows after which there is time to save."""


def _stall(process: subprocess.Popen[bytes], token: str) -> None:
    stopped = _highest_rank(token) or process.pid
    for number, seconds in ((signal.SIGSTOP, _STALL_SECONDS), (signal.SIGCONT, _STALL_SECONDS / 2)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _highest_rank(token: str) -> int | None:
    """The process of the command that a launcher gave the highest RANK; None where none has one."""
    ranks: dict[int, int] = {}
    for pid in _carriers(token):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == b"RANK" and value.isdigit():
                    ranks.setdefault(int(value), pid)
    return ranks[max(ranks)] if ranks else None


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _kill_all(process: subprocess.Popen[bytes], token: str) -> list[int]:
    """Until nobody carries the token: a process may have started another while it was looked for."""
    killed = []
    _signal_group(process, signal.SIGKILL)
    for _ in range(10):
        carriers = [pid for pid in _carriers(token) if pid != process.pid]
        if not carriers:
            break
        for pid in carriers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += carriers
        time.sleep(_POLL_SECONDS)
    return killed


def _linger(token: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_carriers(token)):
        time.sleep(_POLL_SECONDS)


def _carriers(token: str) -> Iterator[int]:
    """Living processes with the token in their environment; a zombie's environment is empty."""
    mark = f"{_TOKEN_VARIABLE}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


@contextlib.contextmanager
def _ended_group(process: subprocess.Popen[bytes], token: str, left: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        left += _kill_all(process, token)
        process.wait(_GRACE_SECONDS)


@contextlib.contextmanager
def _ended_output(output: KeptOutput) -> Iterator[None]:
    try:
        yield
    finally:
        if output.ident is not None:
            output.join(_GRACE_SECONDS)
