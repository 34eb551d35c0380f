"""What a program does between the start of a run and its first window must not change what was restored.

A twin does it before its first window only, and an attempt that resumes does it in the middle of the run. So the random
streams go on from where they were restored, whatever was drawn or seeded meanwhile; and weights that were written to (a
pretrained model loaded inside `with run:`) are an error, before a save could replace good checkpoints by them.

Seen is what torch counts as a write: `load_state_dict`, in-place operations. Not seen: `.data`, NumPy. It ends with the
first call of `windows()`: what stands between two loops over windows may well be meant for the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import nn

from samerun.errors import UsageError
from samerun.run.starting.start import Started, StartKind
from samerun.state import names
from samerun.state.rng import capture_rng, restore_rng

_SHOWN: Final = 3


class Preamble:
    """Begins when a start is over. A fresh run may still do as it likes."""

    def __init__(self, models: Mapping[str, nn.Module], started: Started) -> None:
        self._models = models
        self._checkpoint = started.checkpoint
        self._is_open = started.kind is not StartKind.FRESH
        self._streams = capture_rng() if self._is_open else {}
        self._weights = self._versions() if self._is_open else {}

    def end(self) -> None:
        """Before the first window. Raises UsageError where restored weights were written to. Local."""
        if not self._is_open:
            return
        self._is_open = False
        now = self._versions()
        changed = [
            name for name, (parameter, version) in self._weights.items() if not _is(now, name, parameter, version)
        ]
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise UsageError(
                f"weights were written to between the start of the run and its first window: "
                f"{', '.join(changed[:_SHOWN])}{more}; what was restored from {self._checkpoint} would be lost. Load "
                f"weights before Run is entered, or begin a new run from them (samerun.warm_start)"
            )
        restore_rng(self._streams)
        self._streams, self._weights = {}, {}

    def _versions(self) -> dict[str, tuple[nn.Parameter, int]]:
        return {name: (parameter, parameter._version) for name, parameter in names.parameters(self._models).items()}


def _is(now: Mapping[str, tuple[nn.Parameter, int]], name: str, parameter: nn.Parameter, version: int) -> bool:
    other, other_version = now.get(name, (None, None))
    return other is parameter and other_version == version
