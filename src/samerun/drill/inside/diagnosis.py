"""Whether what was done to a run was named: which rank, which window, which tensor or module. Pure.

a slow rank          a straggler report with that rank (three ranks or more; fewer accuse nobody)
a non-finite batch   that window, that rank, and the module whose forward gave it
a poisoned batch     an alarm in that very window
a flipped bit        that tensor, and of three replicas or more that rank; the run goes back to before it, by a
                     recorded decision, and it does not come back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from samerun.drill.inside.points import TwinFacts
from samerun.health.rollback.story import Standing, Story
from samerun.run.faults import Deed, Fault

SPIKE_WINDOW: Final = 40
"""By then the detector has a baseline."""
REPORT_WINDOWS: Final = 10
_MIN_RANKS: Final = 3
_LEAST_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One planned fault and what the run said of it."""

    fault: str
    is_named: bool
    said: str

    def to_json(self) -> dict[str, Any]:
        return {"fault": self.fault, "named": self.is_named, "said": self.said}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run left about itself, and what was really done to it."""

    hits: Sequence[Mapping[str, Any]]
    fired: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    """The journal."""
    findings: Sequence[tuple[int, Mapping[str, Any]]]
    """(rank, what it alone saw)."""
    stories: Sequence[Story]


def checksum_windows(facts: TwinFacts) -> int:
    return max(2, facts.num_windows // 10)


def strikes(facts: TwinFacts) -> tuple[Fault, ...]:
    """A slow rank and a flipped bit, as far as this many ranks and windows can tell."""
    flip_at = max(REPORT_WINDOWS + 1, facts.num_windows // 4)
    if facts.num_ranks < 2 or not facts.is_replicated or flip_at + checksum_windows(facts) + 2 > facts.num_windows:
        return ()
    flip = Fault(at=f"window:{flip_at}.microbatch:0", rank=1, deed=Deed.FLIP)
    if facts.num_ranks < _MIN_RANKS or not facts.is_even:
        return (flip,)
    seconds = max(_LEAST_SECONDS, facts.window_seconds)
    return (Fault(at="window:0.microbatch:0", rank=facts.num_ranks - 1, deed=Deed.SLOW, seconds=seconds), flip)


def not_possible(facts: TwinFacts) -> list[str]:
    """What this command's ranks, wrapping or length leave undrilled, in words."""
    notes = []
    if facts.num_ranks < 2 or not facts.is_replicated:
        notes.append("no replicas under DDP: no bit was flipped in one of them")
    elif not strikes(facts):
        notes.append(f"{facts.num_windows} windows are too few for a flipped bit and what follows; train for longer")
    if facts.num_ranks < _MIN_RANKS:
        notes.append("fewer than three ranks accuse nobody of being slow: no rank was slowed down")
    elif not facts.is_even:
        notes.append("ranks have unequal numbers of microbatches, and so unequal work: no rank was slowed down")
    if facts.num_windows <= SPIKE_WINDOW:
        notes.append(f"fewer than {SPIKE_WINDOW + 1} windows: no batch was poisoned")
    return notes


def diagnose(seen: Seen, facts: TwinFacts) -> list[Diagnosis]:
    """One for each kind of fault that really struck."""
    found = []
    for deed, judge in ((Deed.NON_FINITE, _non_finite), (Deed.POISON, _poison), (Deed.FLIP, _flip)):
        hit = next((hit for hit in seen.hits if hit["do"] == deed.value), None)
        if hit is not None:
            found.append(judge(hit, seen, facts))
    slow = next((one for one in seen.fired if one["do"] == Deed.SLOW.value), None)
    return found if slow is None else [*found, _slow(slow, seen)]


def _non_finite(hit: Mapping[str, Any], seen: Seen, facts: TwinFacts) -> Diagnosis:
    window, rank, module = _window(hit), hit["rank"], str(hit["hit"])
    said = [
        one["culprit"] for found_on, one in seen.findings
        if (found_on, one["event"], one.get("window")) == (rank, "non_finite", window) and one["culprit"]
    ]  # fmt: skip
    skipped = any(one["event"] == "skipped" and one["window"] == window for one in seen.events)
    named = any(_same_name(module, str(culprit["name"])) for culprit in said)
    if facts.is_sharded:  # sharded models are not replayed: the window is named, the module is not
        named, module = skipped, "(sharded: no module)"
    words = f"skipped; first in the {said[0]['place']} of {said[0]['name']}" if said else "no module"
    return Diagnosis(
        fault=f"a non-finite batch in window {window} on rank {rank}, from module {module}",
        is_named=skipped and named,
        said=words if skipped else "nothing",
    )


def _poison(hit: Mapping[str, Any], seen: Seen, facts: TwinFacts) -> Diagnosis:
    window = _window(hit)
    alarms = [one for one in seen.events if one["event"] == "health" and one["kind"] == "spike"]
    here = [one for one in alarms if one["window"] == window == one["onset"]]
    said = "nothing" if not here else f"{here[0]['series']} is {here[0]['z']:.1f} spreads above its baseline"
    return Diagnosis(fault=f"a poisoned batch in window {window}", is_named=bool(here), said=said)


def _flip(hit: Mapping[str, Any], seen: Seen, facts: TwinFacts) -> Diagnosis:
    window, rank, tensor = _window(hit), hit["rank"], str(hit["hit"])
    fault = f"a flipped bit in {tensor} on rank {rank} in window {window}"
    found = next((one for one in seen.events if one["event"] == "replicas_differ"), None)
    if found is None:
        return Diagnosis(fault=fault, is_named=False, said="nothing")
    soon = window < found["window"] <= window + checksum_windows(facts)
    right_rank = found["ranks"] == [rank] if facts.num_ranks >= _MIN_RANKS else rank in found["ranks"]
    right_tensor = any(_same_name(name, tensor) for name in found["tensors"])
    undone = [
        one for one in seen.stories
        if one.record.evidence.get("tensors") and one.standing is Standing.IN_FORCE and one.target is not None
        and one.outcome is not None and not one.outcome["came_back"]
        and one.record.evidence["decided"]["target"]["windows"] <= window
    ]  # fmt: skip
    what = f"window {found['window']}, ranks {found['ranks']}: {', '.join(found['tensors'][:2])}"
    done = f"; decision {undone[0].record.number} went back to {undone[0].target}" if undone else "; not undone"
    named = soon and right_rank and right_tensor and len(undone) == 1
    return Diagnosis(fault=fault, is_named=named, said=what + done)


def _slow(fault: Mapping[str, Any], seen: Seen) -> Diagnosis:
    reports = [one["straggler"] for one in seen.events if one["event"] == "straggler" and one["straggler"]]
    right = [one for one in reports if one["rank"] == fault["rank"]]
    named = bool(right) and len(right) * 2 > len(reports)
    ranks = sorted({one["rank"] for one in reports})
    said = f"rank {right[0]['rank']}, {right[0]['cause']}, {right[0]['slow']:.2f}x" if right else f"ranks {ranks}"
    return Diagnosis(fault=f"a slow rank {fault['rank']}", is_named=named, said=said if reports else "nothing")


def _window(fault: Mapping[str, Any]) -> int:
    return int(str(fault["at"]).removeprefix("window:").split(".")[0])


def _same_name(one: str, other: str) -> bool:
    """Names of one thing as the loop's model and as the bare one have it: `module.tok` and `tok`."""
    return one == other or one.endswith("." + other) or other.endswith("." + one)
