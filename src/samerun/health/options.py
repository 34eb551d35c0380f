"""What a user says about health, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from samerun.core.choice import Choice
from samerun.errors import UsageError
from samerun.health.rollback.ladder import Limits
from samerun.health.sinks import Sink

REPORT_WINDOWS: Final = 50
CHECKSUM_WINDOWS: Final = 200


class Mode(Choice):
    """How far health goes by itself."""

    OFF = "off"
    OBSERVE = "observe"
    """Records and findings; nothing is proposed."""
    ADVISE = "advise"
    """Also what a person could do about an incident, as a decision record."""
    ACT = "act"
    """Also does it, within the budgets: rewinds to a good checkpoint, quarantines samples, or stops for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOptions:
    """`Run(health=HealthOptions(mode="act", …))`; `Run(health="act")` takes the defaults. Raises UsageError."""

    mode: str | Mode = Mode.OBSERVE
    report_windows: int = REPORT_WINDOWS
    """How often ranks compare their times."""
    checksum_windows: int = CHECKSUM_WINDOWS
    """How often DDP replicas compare their state, bitwise."""
    replay_windows: int | None = None
    """Every so many windows the last microbatch is computed again before the step, and compared bitwise. Costs its
    forward and backward; None: only where something is wrong already."""
    sinks: Sequence[Sink] = ()
    """Where loss, gradient norm, rate and times of each window go, from rank 0; closed when the run is left."""
    margin: int | None = None
    """Windows between an onset and the checkpoint gone back to; None: from the optimizer's β2, 100 to 500."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", Mode.parse(self.mode, option="health"))
        for name in ("report_windows", "checksum_windows", "replay_windows", "margin"):
            value: Any = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"HealthOptions({name}={value!r}): write a number of windows, 1 or more")

    @classmethod
    def parse(cls, value: str | Mode | HealthOptions) -> HealthOptions:
        return value if isinstance(value, HealthOptions) else cls(mode=value)

    def overridden(self, values: Mapping[str, Any]) -> HealthOptions:
        """With other values by name, as a fault plan gives them."""
        try:
            return replace(self, **values)
        except TypeError as error:
            raise UsageError(f"health options of a fault plan: {error}") from error

    @property
    def is_off(self) -> bool:
        return self.mode is Mode.OFF

    @property
    def decides(self) -> bool:
        """Whether decisions are written."""
        return self.mode in (Mode.ADVISE, Mode.ACT)
