"""One start of a drilled run and what must come of it, as data."""

from __future__ import annotations

from dataclasses import dataclass

from samerun.drill.damage import Damage
from samerun.drill.processes import Blow
from samerun.errors import ExitCode
from samerun.run.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    title: str
    faults: tuple[Fault, ...] = ()
    """Planned inside the run. All of them must happen, or nothing was drilled."""
    is_last: bool = False
    """It must end with 0. Every other chapter is interrupted."""
    exit_code: ExitCode | None = None
    """What an interrupted start must answer; None: anything but 0."""
    blow: Blow | None = None
    """Struck from outside as soon as the faults have happened."""
    damage: Damage | None = None
    """Done to the newest checkpoint before this start."""
    nproc: int | None = None
    until_it_fails_to_come: bool = False
    """A fault that never comes is the end of the drill, not a problem: there is nothing left to interrupt."""
    had_warning: bool = False
    """There was time to save: the next start must not do anything again."""
    orphans_stop: bool = False
    """Ranks without a launcher are given time to stop by themselves, as they should."""


LAST = Chapter(title="no more interruptions", is_last=True)
