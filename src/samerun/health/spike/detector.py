"""Spikes of loss and gradient norm: alarm, onset, and what became of it.

    each window   z of the loss and of ln(gradient norm) against the last 128 accepted windows
    z > k         alarm; the window and all that follow while it lasts stay out of the baseline
    onset         walked back from the alarm over at most 200 windows, ending at 5 ordinary ones in a row
    alone         a single window out and none after it is noise: it teaches the threshold, which would grow ever
                  stricter on a heavy tail if it never heard of what it rejects
    within 100    the median of 5 losses is back at m + 3s of the onset → recovered
    otherwise     shifted (a new level), diverging (still rising) or unrecovered; then a new baseline begins

State is a function of loss and gradient norm alone: with it in the checkpoint a resumed run alarms as its twin would.
Non-finite values are not spikes and never enter; they are reported by the step itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from samerun.health.spike.robust import Baseline, median, trend
from samerun.health.spike.series import WIDTH, Series
from samerun.health.spike.threshold import ALPHA

RECOVERY_WINDOWS: Final = 100
_HISTORY: Final = 200
_ORDINARY_IN_A_ROW: Final = 5
_RECOVERED_SPREADS: Final = 3.0
_GRACE: Final = 2 * WIDTH


class Kind(Enum):
    SPIKE = "spike"
    """Loss or gradient norm left its baseline upwards."""
    RECOVERED = "recovered"
    SHIFTED = "shifted"
    DIVERGING = "diverging"
    UNRECOVERED = "unrecovered"
    DRIFT = "drift"
    """A series creeps upwards by less than a spike each window. Once in 1.4e5 windows of Gaussian noise by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a window showed, with the figures that it rests on."""

    kind: Kind
    window: int
    series: str
    onset: int
    """First window that was out of the ordinary; this one for drift."""
    value: float
    z: float
    k: float
    center: float
    spread: float
    alpha: float
    is_certain: bool
    """False while the threshold is uncalibrated or the baseline young: told, but nothing should act on it."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PLAIN} | {"kind": self.kind.value}

    def __str__(self) -> str:
        if self.kind is Kind.SPIKE:
            sure = "" if self.is_certain else ", threshold not yet calibrated"
            return (
                f"window {self.window}: {self.series} {self.value:.4g} is {self.z:.1f} spreads above its baseline "
                f"{self.center:.4g} (limit {self.k:.1f}{sure}); began at window {self.onset}"
            )
        if self.kind is Kind.DRIFT:
            return (
                f"window {self.window}: {self.series} creeps upwards, now {self.value:.4g} (baseline {self.center:.4g})"
            )
        return f"window {self.window}: the spike that began at window {self.onset} is {self.kind.value}"


_PLAIN: Final = ("window", "series", "onset", "value", "z", "k", "center", "spread", "alpha", "is_certain")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """One series at one window."""

    series: Series
    value: float
    raw: float
    baseline: Baseline | None
    z: float | None

    @property
    def is_out(self) -> bool:
        return self.z is not None and self.z > self.series.threshold.k


def _judged(series: Series, value: float, raw: float) -> _Judged:
    before = series.baseline()
    return _Judged(series=series, value=value, raw=raw, baseline=before, z=None if before is None else before.z(value))


class SpikeDetector:
    """Feed it every decided window in order; it answers with findings, mostly none."""

    def __init__(self, *, alpha: float = ALPHA) -> None:
        self.loss = Series("loss", logarithmic=False, alpha=alpha)
        self.grad_norm = Series("grad_norm", logarithmic=True, alpha=alpha)
        self._history: deque[tuple[int, bool]] = deque(maxlen=_HISTORY)
        self._episode: dict[str, Any] | None = None
        self._num_since_epoch = 0

    def after(self, *, window: int, loss: float, grad_norm: float) -> list[Finding]:
        """The findings of one window; values that are not finite (or a norm of 0) are passed over."""
        judged = [
            _judged(series, value, raw)
            for series, value, raw in (
                (self.grad_norm, math.log(grad_norm) if 0 < grad_norm < math.inf else math.nan, grad_norm),
                (self.loss, loss, loss),
            )
            if math.isfinite(value)
        ]
        out = [one for one in judged if one.is_out]
        self._history.append((window, bool(out)))
        self._num_since_epoch += 1
        if self._episode is not None:
            return self._in_episode(window, loss, judged, out)
        if out:
            return self._alarm(window, out, judged)
        drifted = [one for one in judged if one.series.accept(one.value, one.z)]
        return [self._finding(Kind.DRIFT, window, one, onset=window) for one in drifted]

    def new_epoch(self) -> None:
        """A planned change (another phase of the learning rate, another mix of data): the old level says nothing."""
        for series in (self.loss, self.grad_norm):
            series.new_epoch()
        self._episode = None
        self._num_since_epoch = 0

    def _alarm(self, window: int, out: list[_Judged], judged: list[_Judged]) -> list[Finding]:
        onset = self._onset()
        before = next((one.baseline for one in judged if one.series is self.loss), None)
        self._episode = {
            "onset": onset,
            "alarm": window,
            "told": [one.series.name for one in out],
            "losses": [],
            "num_out": 1,
            "z": {one.series.name: one.z for one in out},
            "limit": None if before is None else before.center + _RECOVERED_SPREADS * before.spread,
        }
        return [self._finding(Kind.SPIKE, window, one, onset=onset) for one in out]

    def _in_episode(self, window: int, loss: float, judged: list[_Judged], out: list[_Judged]) -> list[Finding]:
        episode = self._episode
        assert episode is not None
        first_of_series = [one for one in out if one.series.name not in episode["told"]]
        episode["told"] += [one.series.name for one in first_of_series]
        found = [self._finding(Kind.SPIKE, window, one, onset=episode["onset"]) for one in first_of_series]
        episode["num_out"] += bool(out)
        if math.isfinite(loss):
            episode["losses"].append(loss)
        kind = self._outcome(episode, window, is_out=bool(out))
        if kind is None:
            return found
        one = next((one for one in judged if one.series is self.loss), None)
        if one is not None:
            found.append(self._finding(kind, window, one, onset=episode["onset"]))
        self._episode = None
        if kind is not Kind.RECOVERED:
            self.new_epoch()
        elif episode["num_out"] == 1:
            for name, z in episode["z"].items():
                (self.loss if name == self.loss.name else self.grad_norm).threshold.accept(z)
        return found

    def _outcome(self, episode: dict[str, Any], window: int, *, is_out: bool) -> Kind | None:
        losses, limit = episode["losses"], episode["limit"]
        back = len(losses) >= _ORDINARY_IN_A_ROW and limit is not None and not is_out
        if back and median(losses[-_ORDINARY_IN_A_ROW:]) <= limit:
            return Kind.RECOVERED
        if window - episode["alarm"] < RECOVERY_WINDOWS:
            return None
        recent = losses[-RECOVERY_WINDOWS // 2 :]
        if len(recent) < _ORDINARY_IN_A_ROW or limit is None:
            return Kind.UNRECOVERED
        rise, spread = trend(recent) * len(recent), median([abs(x - median(recent)) for x in recent])
        if rise > 3 * spread:
            return Kind.DIVERGING
        return Kind.SHIFTED if abs(rise) <= 3 * spread else Kind.UNRECOVERED

    def _onset(self) -> int:
        onset, ordinary = self._history[-1][0], 0
        for window, is_out in reversed(self._history):
            if is_out:
                onset, ordinary = window, 0
            else:
                ordinary += 1
                if ordinary >= _ORDINARY_IN_A_ROW:
                    break
        return onset

    def _finding(self, kind: Kind, window: int, one: _Judged, *, onset: int) -> Finding:
        before = one.baseline or Baseline(center=one.value, spread=1.0)
        center = math.exp(before.center) if one.series.logarithmic else before.center
        young = self._num_since_epoch < _GRACE
        return Finding(
            kind=kind,
            window=window,
            series=one.series.name,
            onset=onset,
            value=one.raw,
            z=one.z or 0.0,
            k=one.series.threshold.k,
            center=center,
            spread=before.spread,
            alpha=one.series.threshold.alpha,
            is_certain=one.series.threshold.is_calibrated and not young,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values, a few KiB, the same on every rank."""
        return {
            "loss": self.loss.state_dict(),
            "grad_norm": self.grad_norm.state_dict(),
            "out": [window for window, is_out in self._history if is_out],
            "history": [self._history[0][0], self._history[-1][0]] if self._history else [],
            "episode": None if self._episode is None else {**self._episode, "losses": list(self._episode["losses"])},
            "since_epoch": self._num_since_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` returned."""
        self.loss.load_state_dict(state["loss"])
        self.grad_norm.load_state_dict(state["grad_norm"])
        out = set(state["out"])
        self._history.clear()
        if state["history"]:
            first, last = state["history"]
            self._history.extend((window, window in out) for window in range(first, last + 1))
        episode = state["episode"]
        self._episode = None if episode is None else {**episode, "losses": [float(x) for x in episode["losses"]]}
        self._num_since_epoch = int(state["since_epoch"])
