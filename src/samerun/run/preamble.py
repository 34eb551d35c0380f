"""What a program does between the start of a run and its first window must not change what was restored.

A twin does it before its first window only, and an attempt that resumes does it in the middle of the run. So the random
streams go on from where they were restored, whatever was drawn or seeded meanwhile; and weights that were written to (a
pretrained model loaded inside `with run:`), an optimizer, a schedule or a place in the data that was loaded again are
an error, before a save could replace good checkpoints by them.

Seen is what torch counts as a write: `load_state_dict`, in-place operations. Not seen: `.data`, NumPy. Weights that
were written to and are again what the checkpoint says of itself (averaged ones swapped in for an evaluation) are no
error. It ends with the first call of `windows()`: what stands between two loops over windows may well be meant for the
second.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from samerun.data.source import Guarantee
from samerun.errors import UsageError
from samerun.run.config import RunConfig
from samerun.run.starting.start import Started, StartKind
from samerun.state import names
from samerun.state.fingerprint import tensor_digest
from samerun.state.rng import capture_rng, restore_rng

_SHOWN: Final = 3


class Preamble:
    """Begins when a start is over. A fresh run may still do as it likes."""

    def __init__(self, config: RunConfig, started: Started) -> None:
        self._config = config
        self._checkpoint = started.checkpoint
        self._saved = started.saved_digests.get("weights", {})
        self._is_open = started.kind is not StartKind.FRESH
        self._streams = capture_rng() if self._is_open else {}
        self._weights = self._versions() if self._is_open else {}
        self._others = self._marks() if self._is_open else {}

    def end(self) -> None:
        """Before the first window. Raises UsageError where what was restored was written to. Local."""
        if not self._is_open:
            return
        self._is_open = False
        now = self._versions()
        changed = [
            name
            for name, (parameter, version) in self._weights.items()
            if not self._is_untouched(name, parameter, version, now.get(name))
        ]
        others = self._marks()
        changed += [name for name, mark in self._others.items() if not _is_marked(others[name], mark)]
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise UsageError(
                f"written to between the start of the run and its first window: {', '.join(changed[:_SHOWN])}{more}; "
                f"what was restored from {self._checkpoint} would be lost. Run restores it all by itself; load other "
                f"weights before Run is entered, or begin a new run from them (samerun.warm_start)"
            )
        restore_rng(self._streams)
        self._streams, self._weights, self._others = {}, {}, {}

    def _is_untouched(
        self, name: str, parameter: nn.Parameter, version: int, now: tuple[nn.Parameter, int] | None
    ) -> bool:
        """By this rank's own digests in the checkpoint: on another topology every write is a change."""
        if now is None or now[0] is not parameter:
            return False
        return now[1] == version or tensor_digest(parameter) == self._saved.get(name)

    def _versions(self) -> dict[str, tuple[nn.Parameter, int]]:
        return {
            name: (parameter, parameter._version) for name, parameter in names.parameters(self._config.models).items()
        }

    def _marks(self) -> dict[str, Any]:
        """What `load_state_dict` of each would change; an optimizer takes another table of states."""
        marks: dict[str, Any] = {}
        for name, optimizer in self._config.optimizers.items():
            marks[f"optimizer {name}"] = optimizer.state
        for name, schedule in self._config.schedulers.items():
            marks[f"schedule {name}"] = repr(schedule.state_dict())
        if self._config.source.guarantee is Guarantee.EXACT:
            state = self._config.source.state_dict()
            marks["data"] = repr([state.get("position"), state.get("windows")])
        return marks


def _is_marked(now: Any, before: Any) -> bool:
    return now == before if isinstance(before, str) else now is before
