"""Events of a run's journal as sentences for the person who asks what happened. Events of no news have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Event = Mapping[str, Any]


def sentence(event: Event) -> str | None:
    """None for what belongs to every run's course (started, saved, …), and for kinds that are not known here."""
    tell = _TELLERS.get(str(event.get("event")))
    return None if tell is None else tell(event)


def _skipped(event: Event) -> str:
    return f"window {event['window']} was skipped: {str(event['reason']).replace('_', ' ')} (loss {event['loss']})"


def _health(event: Event) -> str:
    if event["kind"] not in ("spike", "drift"):
        return f"window {event['window']}: the spike that began at window {event['onset']} is {event['kind']}"
    what = "left its baseline" if event["kind"] == "spike" else "creeps upwards"
    value, center = float(event["value"]), float(event["center"])  # a number that is not finite is written as its name
    return f"window {event['window']}: {event['series']} {what}: {value:.4g}, baseline {center:.4g}"


def _straggler(event: Event) -> str:
    about = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "time", "window"))
    return f"window {event['window']}: slow ranks or links: {about}"


def _blame(event: Event) -> str:
    return f"window {event['window']}: {event['what']}: {event['blame']}"


def _replicas_differ(event: Event) -> str:
    return f"window {event['window']}: ranks {event['ranks']} hold other bytes of {', '.join(event['tensors'][:3])}"


_TELLERS: Final[Mapping[str, Callable[[Event], str]]] = {
    "skipped": _skipped,
    "skip_rate": lambda event: str(event["alert"]),
    "health": _health,
    "straggler": _straggler,
    "blame": _blame,
    "replicas_differ": _replicas_differ,
    "save_failed": lambda event: f"a save failed: {event.get('error', 'no reason is known')}",
    "budget": lambda event: str(event["text"]),
    "quarantine": lambda event: f"positions {event['ranges']} are passed over by a recorded decision",
}
