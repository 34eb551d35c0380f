"""The preemption budget: does the path from warning to published checkpoint fit before the kill?

    T_warning ≥ T_notice + T_window + T_save + T_teardown + T_margin

T_warning is the smallest link of the kill chain (cloud, orchestrator, shell, launcher): a pod grace of 600 s under
stock torchrun is still 30 s. T_save runs to durable publication, manifest included. A ninety-second save does not fit a
ninety-second warning. The answer is feasibility at the estimates, not a guarantee of a deadline.

When the whole path does not fit, dropping the open window (its gradients; the cursor goes back to the last edge) may.

Sources of the known links: AWS EC2 Spot 120 s; GCP Spot 30 s; Azure Spot 30 s; Kubernetes
terminationGracePeriodSeconds 30 s; Slurm KillWait 30 s, preemption GraceTime 0 s; torchrun 30 s (--shutdown-timeout).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from samerun.errors import UsageError
from samerun.plan import checks

KNOWN_LINKS: Final[dict[str, float]] = {
    "aws-spot": 120.0,
    "gcp-spot": 30.0,
    "azure-spot": 30.0,
    "kubernetes": 30.0,
    "slurm-limit": 30.0,
    "slurm-preemption": 0.0,
    "torchrun": 30.0,
}
"""Default warning of each link in seconds."""

_REMEDIES: Final[dict[str, str]] = {
    "kubernetes": "set terminationGracePeriodSeconds: {seconds}",
    "slurm-limit": "set KillWait={seconds}, or ask earlier: --signal=B:USR1@{seconds}",
    "slurm-preemption": "set GraceTime={seconds} on the partition",
    "torchrun": "start torchrun with --shutdown-timeout {seconds}",
    "aws-spot": "the cloud's notice cannot be raised: shorten the path, or save often enough to lose the rest",
    "gcp-spot": "the cloud's notice cannot be raised: shorten the path, or save often enough to lose the rest",
    "azure-spot": "the cloud's notice cannot be raised: shorten the path, or save often enough to lose the rest",
}


class Outcome(Enum):
    FITS = "fits"
    """Finish the open window, save, tear down."""
    DROP_WINDOW = "drop the open window"
    """Only the save of the last edge fits."""
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of the kill chain and the warning it gives, in seconds."""

    name: str
    warning_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What must happen after the warning. Seconds, at the slow end (p95 or largest seen), not the mean."""

    window_seconds: float
    save_seconds: float
    """Staging, writing, publishing: until the checkpoint is durable."""
    notice_seconds: float = 1.0
    """Until every rank knows: polling and one agreed edge."""
    teardown_seconds: float = 0.0
    margin_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("window_seconds", "save_seconds", "notice_seconds", "teardown_seconds", "margin_seconds"):
            option = name.removesuffix("_seconds")
            checks.not_negative(f"{option} time", getattr(self, name), f"--{option} 10s")
        checks.positive("save time", self.save_seconds, "--save 20s")

    @property
    def without_window_seconds(self) -> float:
        return self.notice_seconds + self.save_seconds + self.teardown_seconds + self.margin_seconds

    @property
    def total_seconds(self) -> float:
        return self.without_window_seconds + self.window_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptPlan:
    """The budget and its verdict."""

    SCHEMA: ClassVar[str] = "samerun.plan.preempt.v1"

    links: tuple[Link, ...]
    path: Path
    warning_seconds: float
    limiting_link: str
    verdict: Outcome
    short_seconds: float
    """What the whole path lacks; 0 when it fits."""
    spare_seconds: float
    remedy: str
    """How to give the limiting link enough; empty when everything fits."""


def link(text: str) -> Link:
    """`kubernetes` (its default), or `kubernetes=600s` (a name of your own is fine with a time). Raises UsageError."""
    from samerun.core.units import parse_seconds

    name, is_given, amount = text.partition("=")
    if is_given:
        return Link(name=name, warning_seconds=parse_seconds(amount))
    if name not in KNOWN_LINKS:
        raise UsageError(
            f"link {name!r} has no known default; write it like '{name}=60s', or one of: {', '.join(KNOWN_LINKS)}"
        )
    return Link(name=name, warning_seconds=KNOWN_LINKS[name])


def plan_preempt(links: tuple[Link, ...], path: Path) -> PreemptPlan:
    """Judges a path against the shortest link. Raises UsageError for an empty chain or impossible times."""
    if not links:
        raise UsageError("the kill chain is empty; write it like --chain aws-spot --chain kubernetes=120s")
    for each in links:
        checks.not_negative(f"warning of {each.name}", each.warning_seconds, f"--chain {each.name}=60s")
    limiting = min(links, key=lambda each: each.warning_seconds)
    warning, need = limiting.warning_seconds, path.total_seconds
    if need <= warning:
        verdict = Outcome.FITS
    elif path.without_window_seconds <= warning:
        verdict = Outcome.DROP_WINDOW
    else:
        verdict = Outcome.DOES_NOT_FIT
    advice = _REMEDIES.get(limiting.name, f"give {limiting.name} at least {{seconds}} s")
    return PreemptPlan(
        links=links,
        path=path,
        warning_seconds=warning,
        limiting_link=limiting.name,
        verdict=verdict,
        short_seconds=max(0.0, need - warning),
        spare_seconds=max(0.0, warning - need),
        remedy="" if verdict is Outcome.FITS else advice.format(seconds=math.ceil(need)),
    )
