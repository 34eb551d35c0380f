"""torchrun in this process: the same arguments, agent and signals; only the exit code is put right.

torchrun answers 1 whatever its workers said. Ranks leave their last words beside its error files, and those decide:
every rank stopped and saved → 75; one says do not restart → 93; one refused → 4; anything else stays a failure.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from samerun.errors import ExitCode
from samerun.run.ending import last_words
from samerun.run.ending.last_words import Word

_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""torchrun's own and USR1, which Slurm sends ahead of a time limit: torchrun would die of it and orphan its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one start of all ranks ended, and what is known about why."""

    code: ExitCode
    reason: str = ""
    rank: int | None = None
    window: int | None = None
    batch: str | None = None
    run_path: str | None = None


def launch(arguments: Sequence[str], *, num_ranks: int) -> Ended:
    """Runs torchrun once with `arguments` (its options, the script, the script's own)."""
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    with tempfile.TemporaryDirectory(prefix="samerun-launch-") as log_dir:
        parsed = torchrun.parse_args(  # type: ignore[no-untyped-call]
            ["--nproc-per-node", str(num_ranks), "--log-dir", log_dir, "--signals-to-handle", _SIGNALS, *arguments]
        )
        if parsed.shutdown_timeout is not None:
            last_words.announce(Path(log_dir), shutdown_seconds=float(parsed.shutdown_timeout))
        failure: str | None = None
        rank: int | None = None
        try:
            torchrun.run(parsed)  # type: ignore[no-untyped-call]
        except SignalException as error:
            failure = f"the launcher was ended by {error.sigval.name}"
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            failure = f"exit code {first.exitcode}; see the output above"
        words = last_words.read_all(Path(log_dir))
        run_path = last_words.run_path(Path(log_dir))
    return judge(words, num_ranks=num_ranks, failure=failure, rank=rank, run_path=run_path)


def judge(
    words: Sequence[Word], *, num_ranks: int, failure: str | None, rank: int | None = None, run_path: str | None = None
) -> Ended:
    """What the ranks' last words and torchrun's verdict (None: it saw no failure) come to. Pure."""
    for code in (ExitCode.DO_NOT_RESTART, ExitCode.REFUSED):
        for word in words:
            if word.code is code:
                return Ended(code=code, reason=word.reason, rank=word.rank, run_path=run_path)
    if len(words) >= num_ranks and all(word.code is ExitCode.STOPPED for word in words):
        return Ended(code=ExitCode.STOPPED, reason=words[0].reason, run_path=run_path)
    if failure is None:
        return Ended(code=ExitCode.DONE, run_path=run_path)
    own = next((word for word in words if word.rank == rank), None)
    return Ended(
        code=ExitCode.FAILED,
        reason=own.reason if own else failure,
        rank=rank,
        window=own.window if own else None,
        batch=own.batch if own else None,
        run_path=run_path,
    )
