"""What a run remembers about itself beside its counters: the loss, evaluations, which samples were seen.

Plain records behind the components `loss` and `samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.errors import UsageError
from samerun.health.spike.detector import SpikeDetector
from samerun.step.noise import NoiseProbe
from samerun.step.outcome import Decision
from samerun.step.parallel.agree import Agreed
from samerun.step.skip_rate import SkipRate


def nothing_waits() -> None:
    """Without a monitor."""


@dataclass(slots=True)
class Losses:
    """The objective of the last window, and every evaluation's last and best value with the update it was seen at."""

    last: float | None = None
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    skips: SkipRate = field(default_factory=SkipRate)
    noise: NoiseProbe | None = None
    spikes: SpikeDetector | None = None
    """Fed by the attempt's monitor; kept here, so that a resumed run alarms as its twin would."""
    settle: Callable[[], None] = nothing_waits
    """Has the monitor look at every decided window first: it looks at short ones together."""

    def after(self, decision: Decision) -> str | None:
        """Returns the alert when this window took the skip rate above its limit."""
        self.last = decision.loss
        return self.skips.after(skipped=bool(decision.skipped), weight=decision.weight)

    def evaluated(self, name: str, value: float, *, better: str | None, update: int) -> bool:
        """Whether `value` is the best so far; never for NaN, nor where nothing is said to be better."""
        if better not in (None, "min", "max"):
            raise UsageError(f"evaluate({name!r}, better={better!r}): write better='min', better='max' or leave it out")
        record = self.evaluations.setdefault(name, {})
        record["last"] = value
        if better is None or value != value:
            return False
        best = record.get("best")
        if best is None or (value < best if better == "min" else value > best):
            record["best"] = value
            record["best_update"] = update
            return True
        return False

    def read(self) -> dict[str, Any]:
        self.settle()
        return {
            "last": self.last,
            "evaluations": {name: dict(record) for name, record in self.evaluations.items()},
            "skips": self.skips.state_dict(),
            "noise": self.noise.state_dict() if self.noise is not None else None,
            "spikes": self.spikes.state_dict() if self.spikes is not None else None,
        }

    def write(self, saved: Mapping[str, Any]) -> None:
        self.last = saved["last"]
        self.evaluations = {name: dict(record) for name, record in saved["evaluations"].items()}
        self.skips.load_state_dict(saved["skips"])
        if self.noise is not None and saved["noise"] is not None:
            self.noise.load_state_dict(saved["noise"])
        if self.spikes is not None and saved.get("spikes") is not None:
            self.spikes.load_state_dict(saved["spikes"])


@dataclass(slots=True)
class Coverage:
    """Which samples the decided windows consumed: an order-independent sum over (epoch, id), mod 2^64, and a count.

    Exactly-once is this digest being what the order function predicts; a repeat or a gap changes it.
    """

    digest: int = 0
    num_samples: int = 0

    def after(self, agreed: Agreed) -> None:
        self.digest = (self.digest + agreed.coverage) % 2**64
        self.num_samples += agreed.num_samples

    def read(self) -> dict[str, Any]:
        return {"digest": f"{self.digest:016x}", "num_samples": self.num_samples}

    def write(self, saved: Mapping[str, Any]) -> None:
        self.digest = int(saved["digest"], 16)
        self.num_samples = int(saved["num_samples"])
