"""The interruptions of the demo, in order, as data."""

from __future__ import annotations

from typing import Final

from samerun.drill.damage import Damage
from samerun.drill.inside.chapters import LAST, Chapter
from samerun.errors import ExitCode
from samerun.run.faults import Deed, Fault

STORY: Final = (
    Chapter(
        title="SIGKILL of rank 1 inside window 9",
        exit_code=ExitCode.FAILED,
        faults=(Fault(at="window:9.microbatch:1", rank=1, deed=Deed.KILL),),
    ),
    Chapter(
        title="SIGTERM to the launcher inside window 17",
        faults=(Fault(at="window:17.microbatch:0", rank=0, deed=Deed.TERM_LAUNCHER),),
        exit_code=ExitCode.STOPPED,
    ),
    Chapter(
        title="SIGKILL of rank 0 while a save is being written",
        exit_code=ExitCode.FAILED,
        faults=(Fault(at="save:writing", rank=0, deed=Deed.KILL, from_window=19),),
    ),
    Chapter(
        title="one flipped byte in the newest checkpoint, and SIGKILL of rank 0 soon after the resume",
        faults=(Fault(at="window:16.step", rank=0, deed=Deed.KILL),),
        exit_code=ExitCode.FAILED,
        damage=Damage.FLIP_TENSORS,
    ),
    LAST,
)
"""With a save every 5 updates: resumes from 5, 18 (the stop's own save), falls back from 18 to 15, and again."""

SHORTEST_RUN_UPDATES: Final = 30
"""The story needs that many updates to be told, and to cross the end of an epoch."""
