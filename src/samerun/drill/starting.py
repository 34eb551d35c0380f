"""Starts of one command in phases: each phase (a twin, the run) begins in an empty folder and is put aside at its end.

The folder has the same path in every phase, so that a path which a program writes into its files is no difference.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from samerun.core.environ import FAULTS_VARIABLE, RUN_VARIABLE
from samerun.drill.processes import Ended, Interruption, run_once
from samerun.errors import UsageError
from samerun.run.faults import FaultPlan

OUT: Final = "{out}"
NPROC: Final = "{nproc}"
_RUN_FOLDER: Final = "samerun-run"
_SEARCHED_LINES: Final = 200
_WANTS_TERMINAL: Final = ("/dev/tty", "not a tty", "Inappropriate ioctl", "EOF when reading a line")
_AGAIN: Final = re.compile(r"\{resume:(.*)\}")
"""A word that is there only when the command is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the user gave after `--`, and the bounds of a start."""

    words: Sequence[str]
    folder: Path | None = None
    """Where it writes, if that is a fixed place; else `{out}` in the words."""
    timeout_seconds: float = 600.0
    grace_seconds: float = 10.0
    nproc: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.words:
            raise UsageError("which command? Example: samerun drill -- python train.py {out}/run")

    @property
    def has_folder(self) -> bool:
        return self.folder is not None or any(OUT in word for word in self.words)


@dataclass(slots=True)
class Stage:
    """One drill's place on disk, and how many starts it has seen."""

    command: Command
    place: Path
    num_starts: int = 0
    shown: list[str] = field(default_factory=list)
    """Every start as a shell line, to be repeated by hand."""
    _has_begun: bool = False

    @property
    def out(self) -> Path:
        return self.command.folder if self.command.folder is not None else self.place / "out"

    @property
    def run(self) -> Path:
        """Where a command that uses samerun is made to keep its run."""
        return self.out / _RUN_FOLDER

    def run_of(self, phase: str) -> Path:
        """The same after the phase was put aside."""
        return self.place / phase / _RUN_FOLDER

    def begin(self) -> None:
        """An empty folder for a new phase. UsageError if something of the user's is there."""
        self.out.mkdir(parents=True, exist_ok=True)
        if any(self.out.iterdir()):
            raise UsageError(f"{self.out} is not empty; a drill starts from nothing. Name an empty folder")
        self._has_begun = True

    def put_aside(self, phase: str) -> Path:
        """Moves what the phase has written; returns where it is now."""
        aside = self.place / phase
        aside.mkdir()
        for entry in sorted(self.out.iterdir()):
            shutil.move(entry, aside / entry.name)
        return aside

    def leave(self) -> None:
        """Nothing of an unfinished phase stays in the user's folder."""
        if self._has_begun and any(self.out.iterdir()):
            self.put_aside("unfinished")

    def start(
        self,
        phase: str,
        plan: FaultPlan,
        *,
        again: bool = False,
        nproc: int | None = None,
        interruption: Interruption | None = None,
        on_poll: Callable[[], None] = lambda: None,
        orphans_stop: bool = False,
        max_file_bytes: int | None = None,
    ) -> Ended:
        """UsageError where the command cannot be started at all.

        `orphans_stop`: what it leaves behind has the grace to end by itself.
        """
        self.num_starts += 1
        logs = self.place / "logs"
        logs.mkdir(exist_ok=True)
        given = {NPROC: str(self.command.nproc if nproc is None else nproc), OUT: str(self.out)}
        words = [_filled(word, given) for word in _words(self.command.words, again=again)]
        environ = {**self.command.environ, RUN_VARIABLE: str(self.run), FAULTS_VARIABLE: plan.to_text()}
        self.shown.append(
            " ".join([*(f"{name}={shlex.quote(text)}" for name, text in environ.items()), shlex.join(words)])
        )
        try:
            return run_once(
                words,
                environ=environ,
                log=logs / f"{self.num_starts:03d}-{phase}.log",
                timeout_seconds=self.command.timeout_seconds,
                on_poll=on_poll,
                interruption=interruption,
                grace_seconds=self.command.grace_seconds,
                linger_seconds=self.command.grace_seconds if orphans_stop else 0.0,
                max_file_bytes=max_file_bytes,
            )
        except OSError as error:
            raise UsageError(f"{words[0]!r} cannot be started: {error}") from error


def _words(words: Sequence[str], *, again: bool) -> list[str]:
    found = ((word, _AGAIN.fullmatch(word)) for word in words)
    return [word if match is None else match.group(1) for word, match in found if match is None or again]


def _filled(word: str, given: dict[str, str]) -> str:
    for name, text in given.items():
        word = word.replace(name, text)
    return word


def why_it_failed(ended: Ended, *, timeout_seconds: float) -> str:
    """Of a start that should have ended with 0: the exit, what may lie behind it, its last lines."""
    tail = _last_lines(ended)
    if ended.exit_code is None:
        return f"it did not end within {timeout_seconds:g} s (--timeout)\n{tail}"
    hint = ""
    if any(said in tail for said in _WANTS_TERMINAL):
        hint = "; it seems to want a terminal or an answer, and a drill gives it none"
    return f"exit {ended.exit_code}{hint}\n{tail}"


def _last_lines(ended: Ended) -> str:
    """The end of the output, and above it what samerun said last: launchers bury reasons under reports of their own."""
    tail = ended.tail().splitlines()
    said = [line for line in ended.tail(_SEARCHED_LINES).splitlines() if "samerun: " in line][-1:]
    return "\n".join([*(line for line in said if line not in tail), *tail])
