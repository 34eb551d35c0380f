"""Component `rng`: this rank's random streams (Python, NumPy, torch, the current accelerator).

Always per rank and always plain: a stream that another rank gets silently is the fault that no curve shows. On another
number of ranks the old streams cannot be dealt out; new ones are derived from (seed, window, rank) and announced.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from samerun.core.component import Captured, Plain, Source
from samerun.errors import MismatchError


def capture_rng() -> dict[str | int, Plain]:
    """The state of every global stream of this process, as plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str | int, Plain] = {
        "python": (version, words, gauss),
        "numpy": (str(kind), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore_rng(state: dict[str | int, Any]) -> None:
    """Puts every stream back. Raises MismatchError when an accelerator's stream is missing on this side or that."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if "cuda" in state:
        if not torch.cuda.is_available():
            raise MismatchError("rng: the checkpoint holds a CUDA stream and this process has no CUDA device")
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


def seed_all(seed: int) -> None:
    """Seeds every global stream of this process (Python's, NumPy's, torch's) from one number.

    A stream that a script leaves unseeded differs between two fresh starts of it, so between a twin and a run, too.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_at(seed: int, window: int, microbatch: int) -> None:
    """Seeds every global stream for one microbatch of a run, whichever rank runs it."""
    digest = hashlib.sha256(f"samerun.position.v1|{seed}|{window}|{microbatch}".encode()).digest()
    seed_all(int.from_bytes(digest[:8], "big") >> 1)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Whatever the body draws, the global streams afterwards are those from before it."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


class Rng:
    name = "rng"

    def __init__(self) -> None:
        self.derived = False
        """True when the streams could not be restored but were derived for another number of ranks."""

    def capture(self) -> Captured:
        return Captured(plain=capture_rng())

    def restore(self, source: Source) -> None:
        if not isinstance(source.plain, dict):
            raise MismatchError("rng: the checkpoint's entry is not a table of streams")
        restore_rng(source.plain)

    def derive(self, *, run_id: str, windows: int, rank: int) -> None:
        """Fresh streams for a rank of another topology: a pure function of the run, the window and the rank."""
        digest = hashlib.sha256(f"samerun.rng.v1|{run_id}|{windows}|{rank}".encode()).digest()
        seed_all(int.from_bytes(digest[:8], "big") >> 1)
        self.derived = True


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
