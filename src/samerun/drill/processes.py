"""One start of a training command in a process group of its own, and its certain end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_POLL_SECONDS: Final = 0.1
_GRACE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    exit_code: int | None
    """None: it did not end within its time and was killed."""
    seconds: float
    log: Path

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
) -> Ended:
    """Starts `command`, waits for its end, and leaves no process of its group behind, whatever happens here."""
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environ},
            start_new_session=True,
        )
    with _ended_group(process):
        code: int | None = None
        while (code := process.poll()) is None and time.monotonic() - began < timeout_seconds:
            on_poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
    return Ended(exit_code=code, seconds=time.monotonic() - began, log=log)


@contextlib.contextmanager
def _ended_group(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        # Ranks of a dead launcher are orphans in the same group: they go, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_GRACE_SECONDS)
