"""torchrun in this process: the same arguments, agent and signals; only the exit code is put right.

torchrun answers 1 whatever its workers said. Ranks leave their last words beside its error files, and those decide:
every rank stopped and saved → 75; one says do not restart → 93; one refused → 4; anything else stays a failure.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from samerun.errors import ExitCode
from samerun.run import last_words


def launch(arguments: Sequence[str], *, num_ranks: int) -> tuple[ExitCode, str]:
    """Runs torchrun with `arguments` (its options, the script, the script's own). Returns the code and the reason."""
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    with tempfile.TemporaryDirectory(prefix="samerun-launch-") as log_dir:
        parsed = torchrun.parse_args(  # type: ignore[no-untyped-call]
            ["--nproc-per-node", str(num_ranks), "--log-dir", log_dir, *arguments]
        )
        last_words.announce(Path(log_dir), shutdown_seconds=float(parsed.shutdown_timeout))
        try:
            torchrun.run(parsed)  # type: ignore[no-untyped-call]
            failure = ""
        except SignalException as error:
            failure = f"the launcher was ended by {error.sigval.name}"
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            failure = f"rank {rank} ended with exit code {first.exitcode}; see its output above"
        words = last_words.read_all(Path(log_dir))
    return judge(words, num_ranks=num_ranks, failure=failure)


def judge(words: Sequence[tuple[ExitCode, str]], *, num_ranks: int, failure: str) -> tuple[ExitCode, str]:
    """What the ranks' last words and torchrun's verdict come to. Pure."""
    for code in (ExitCode.DO_NOT_RESTART, ExitCode.REFUSED):
        for said, reason in words:
            if said is code:
                return code, reason
    if len(words) >= num_ranks and all(said is ExitCode.STOPPED for said, _ in words):
        return ExitCode.STOPPED, words[0][1]
    return (ExitCode.FAILED, failure) if failure else (ExitCode.DONE, "")
