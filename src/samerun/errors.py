"""Every error that samerun raises, drawn once, with the exit code a command ends with.

    SamerunError                    1   something failed
    ├── UsageError (ValueError)     2   the caller asked for something impossible; says what to write instead
    ├── CheckpointError             3   a checkpoint is not what it claims to be
    │   ├── DamagedError                bytes differ from their digest, are cut, missing or swapped
    │   │   └── UnfinishedError             a checkpoint without its manifest: the save never got that far
    │   ├── SchemaError                 unknown schema, or a file that is not canonical
    │   └── MismatchError               sound bytes that do not fit this run: shape, dtype, coverage, missing component
    ├── StorageError (OSError)      1   the file system or object store failed
    │   ├── NotFoundError               (FileNotFoundError)
    │   └── AlreadyExistsError          (FileExistsError) put-if-absent lost
    ├── WindowError                 2   the window's contract was broken: second step, missing backward, early exit
    ├── PeerError                   1   another rank failed or vanished
    ├── SaveFailedError             1   a save beside training failed, and the run's policy is to stop
    ├── TornCopyError               1   a tensor changed while it was being copied for a save; nothing was published
    └── FencedError                 4   a newer attempt of this run exists; this one may write nothing more

    Stop                                how a run ends a process on purpose (SystemExit in scripts,
    ├── Stopped                    75   a plain exception in notebooks): stopped and saved, start me again
    ├── Refused                     4   nothing touched: another run's path, unsafe topology, no usable checkpoint
    └── DoNotRestart               93   starting again would only repeat the failure

Messages say what, where (rank, window, path), what was expected, what was found, and what to do.
"""

import builtins
import sys
from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    NEGATIVE = 3
    """A check came out negative: damage found, runs differ, plan does not fit."""
    REFUSED = 4
    STOPPED = 75
    """EX_TEMPFAIL: stopped and saved, start me again."""
    DO_NOT_RESTART = 93


class SamerunError(Exception):
    exit_code: ExitCode = ExitCode.FAILED


class UsageError(SamerunError, ValueError):
    exit_code = ExitCode.USAGE


class CheckpointError(SamerunError):
    exit_code = ExitCode.NEGATIVE


class DamagedError(CheckpointError):
    pass


class UnfinishedError(DamagedError):
    pass


class SchemaError(CheckpointError):
    pass


class MismatchError(CheckpointError):
    pass


class StorageError(SamerunError, OSError):
    pass


class NotFoundError(StorageError, FileNotFoundError):
    pass


class AlreadyExistsError(StorageError, FileExistsError):
    pass


class WindowError(SamerunError):
    exit_code = ExitCode.USAGE


class PeerError(SamerunError):
    pass


class TornCopyError(SamerunError):
    pass


class SaveFailedError(SamerunError):
    pass


class FencedError(SamerunError):
    exit_code = ExitCode.REFUSED


def _in_notebook() -> bool:
    return hasattr(builtins, "get_ipython") or "ipykernel" in sys.modules


_StopBase: type[BaseException] = Exception if _in_notebook() else SystemExit


class Stop(_StopBase):  # type: ignore[misc, valid-type]  # chosen once: a notebook's kernel must survive
    """A deliberate end of this process. In a script it is a SystemExit with the promised code."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, reason: str) -> None:
        super().__init__(int(self.exit_code))
        self.code = int(self.exit_code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Stopped(Stop):
    exit_code = ExitCode.STOPPED


class Refused(Stop):
    exit_code = ExitCode.REFUSED


class DoNotRestart(Stop):
    exit_code = ExitCode.DO_NOT_RESTART
