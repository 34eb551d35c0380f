"""What a drill comes to: one word, what differs first in each component, and what is known of the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from samerun.errors import ExitCode

if TYPE_CHECKING:
    from samerun.drill.traces import First

SCHEMA: Final = "samerun.drill.v1"


class Kind(Enum):
    """The worst that is true, from good to bad."""

    SAME = "same"
    LOST_WORK = "lost work"
    """Ends as the twin, but did again what a checkpoint held or what there was time to save."""
    NOT_NAMED = "not named"
    """The same run, but a fault that was planned went by without being named."""
    DRIFT = "drift"
    """The same samples, counters and schedule; other numbers."""
    WRONG = "wrong"
    """Exit 0 with other samples, counters, learning rates, or with state that was not restored."""
    CRASHED = "crashed"
    HUNG = "hung"
    CANNOT_TELL = "cannot tell"
    """The command, not its resume, is in the way: it fails by itself, or ends before any interruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    kind: Kind
    components: Mapping[str, First | None] = field(default_factory=dict)
    """Component → its first difference; None: the same."""
    cause: Sequence[str] = ()
    """Components that were measured to be wrong right after a restore."""
    suspected: Sequence[str] = ()
    """Components of which no file of the command holds anything: what is never saved cannot come back."""
    problem: str | None = None
    """Why there is nothing to compare: it crashed, hung, or could not be drilled."""
    lost_updates: int | None = None
    """Updates that were done again, beyond those since the last save that could be used; None: not known."""
    notes: Sequence[str] = ()
    diagnoses: Sequence[Mapping[str, Any]] = ()
    """Of each planned fault whether it was named, and what was said of it."""

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DONE if self.kind is Kind.SAME else ExitCode.NEGATIVE

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.kind.value,
            "components": {
                name: {
                    "verdict": "same" if first is None else "differs",
                    "first": None if first is None else first.to_json(),
                }
                for name, first in self.components.items()
            },
            "cause": list(self.cause),
            "suspected": list(self.suspected),
            "problem": self.problem,
            "lost_updates": self.lost_updates,
            "notes": list(self.notes),
            "diagnoses": [dict(one) for one in self.diagnoses],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Everything that happened, for the table and for `--json`."""

    scenario: str
    judgement: Judgement
    starts: Sequence[Mapping[str, Any]]
    interruptions: Sequence[str]
    seed: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "scenario": self.scenario,
            **self.judgement.to_json(),
            "starts": [dict(start) for start in self.starts],
            "interruptions": list(self.interruptions),
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
        }
