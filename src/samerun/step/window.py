"""One window as the user's loop sees it: an iterable of batches, `backward` for each, `step` once at the end.

    for batch in window:                     autocast entered, gradient sync set for this forward
        loss_sum, weight = loss_fn(model, batch)
        window.backward(loss_sum, weight)    autocast left first, then backward; a bad loss still takes part
    outcome = window.step()                  agree, unscale, check, clip, update or skip

A window is decided or it never happened. Leaving the loop early, a batch without backward, or a second step raise
WindowError; the gradients are dropped and nothing is committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol

import torch

from samerun.errors import UsageError, WindowError
from samerun.state import names
from samerun.state.rng import preserved_rng
from samerun.step.engine import Engine
from samerun.step.outcome import Outcome
from samerun.step.parallel.agree import Agreed, Flags, Share
from samerun.step.parallel.filler import ForwardRecorder


class MicroBatch(Protocol):
    @property
    def num_samples(self) -> int: ...

    @property
    def coverage(self) -> int: ...

    @property
    def value(self) -> Any: ...


class WindowData(Protocol):
    """This rank's part of one window of data."""

    @property
    def num_microbatches(self) -> int: ...

    @property
    def slots(self) -> int: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


class _Phase(Enum):
    OPEN = "not started"
    HANDING_OUT = "handing out batches"
    EXHAUSTED = "ready to step"
    DECIDED = "decided"
    BROKEN = "left early"


class Window:
    def __init__(
        self,
        engine: Engine,
        data: WindowData,
        *,
        index: int,
        flags: Callable[[], Flags],
        decided: Callable[[Outcome, Agreed], None],
        at: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._data = data
        self.index = index
        """The absolute number of this window, from 0 over the whole run."""
        self._flags = flags
        self._decided = decided
        self._at = at
        self._phase = _Phase.OPEN
        self._awaiting_backward = False
        self._autocast = contextlib.ExitStack()
        self._recorder = ForwardRecorder(engine.models)
        self._buffers = {name: buffer.detach().clone() for name, buffer in names.buffers(engine.models).items()}
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        self._weight, self._loss_sum, self._num_bad = zero, zero, zero
        self._num_samples = 0
        self._coverage = 0

    @property
    def is_decided(self) -> bool:
        return self._phase is _Phase.DECIDED

    def __len__(self) -> int:
        """How many batches this rank's loop sees."""
        topology = self._engine.topology
        return len(range(topology.replica, self._data.num_microbatches, topology.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        if self._phase is not _Phase.OPEN:
            raise WindowError(f"window {self.index} was iterated before ({self._phase.value}); take the next window")
        self._phase = _Phase.HANDING_OUT
        try:
            yield from self._hand_out()
            self._fill()
            self._phase = _Phase.EXHAUSTED
        finally:
            self._autocast.close()
            self._engine.sync.reset()
            self._recorder.forget()
            if self._phase is _Phase.HANDING_OUT:
                self._phase = _Phase.BROKEN
                self._engine.drop_gradients()

    def backward(
        self, loss_sum: torch.Tensor | None = None, weight: torch.Tensor | float | None = None, *, mean: Any = None
    ) -> None:
        """Backward of one batch's `loss_sum`: the sum over its `weight` supervised tokens (or examples).

        `mean=loss, weight=n` is the same for a loss that is a mean over n. `weight` may be a 0-dim tensor on the
        device. No host synchronisation. Raises WindowError outside a batch, UsageError for what is no scalar loss.
        """
        self._autocast.close()
        loss, weight = self._one_loss(loss_sum, weight, mean)
        self._count(loss.detach(), weight)
        torch.autograd.backward(self._engine.loss_scale.scaled(loss))
        self._awaiting_backward = False

    def record(self, loss_sum: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Counts a batch whose backward the user's code ran itself, on exactly this `loss_sum`."""
        self._autocast.close()
        if self._engine.loss_scale.enabled:
            raise UsageError(
                f"window {self.index}: record() cannot be used with precision='fp16', where the loss must be scaled "
                f"before backward; use window.backward(loss_sum, weight)"
            )
        loss, weight = self._one_loss(loss_sum, weight, None)
        self._count(loss.detach(), weight)
        self._awaiting_backward = False

    def step(self) -> Outcome:
        """Decides the window with all ranks. Collective. Raises WindowError unless every batch had its backward."""
        if self._phase is not _Phase.EXHAUSTED:
            raise WindowError(f"window {self.index}: step() while it is {self._phase.value}; {_ADVICE[self._phase]}")
        self._at(f"window:{self.index}.step")
        share = Share(
            weight=self._weight,
            loss_sum=self._loss_sum,
            num_bad_losses=self._num_bad,
            num_samples=self._num_samples,
            coverage=self._coverage,
            flags=self._flags(),
        )
        outcome, agreed = self._engine.decide(share)
        if not outcome.updated:
            self._put_buffers_back()
        self._phase = _Phase.DECIDED
        self._decided(outcome, agreed)
        return outcome

    def _hand_out(self) -> Iterator[Any]:
        last_slot = (self._data.slots if self._engine.sync.forwards_must_match else len(self)) - 1
        for slot, microbatch in enumerate(self._data):
            self._at(f"window:{self.index}.microbatch:{slot}")
            self._num_samples += microbatch.num_samples
            self._coverage = (self._coverage + microbatch.coverage) % 2**64
            self._engine.sync.before_forward(last=slot == last_slot)
            if slot == len(self) - 1 and slot < last_slot:
                self._recorder.start()
            self._autocast.enter_context(self._engine.precision.autocast(self._engine.device))
            self._awaiting_backward = True
            yield microbatch.value
            if self._awaiting_backward:
                raise WindowError(
                    f"window {self.index}, batch {slot} of {len(self)}: no backward before the next batch; call "
                    f"window.backward(loss_sum, weight) once for each batch (weight 0 for an empty one)"
                )

    def _fill(self) -> None:
        """Forwards without data where sharded peers have one more microbatch than this rank."""
        missing = self._data.slots - len(self) if self._engine.sync.forwards_must_match else 0
        if not missing:
            return
        self._recorder.stop()
        kept = {name: buffer.detach().clone() for name, buffer in names.buffers(self._engine.models).items()}
        for remaining in reversed(range(missing)):
            self._engine.sync.before_forward(last=remaining == 0)
            with preserved_rng(), self._engine.precision.autocast(self._engine.device):
                self._recorder.replay()
        self._copy_into_buffers(kept)

    def _one_loss(
        self, loss_sum: torch.Tensor | None, weight: torch.Tensor | float | None, mean: Any
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        if not self._awaiting_backward:
            raise WindowError(
                f"window {self.index}: backward() without a batch, or a second one for the same batch; add the parts "
                f"of a batch's loss and call backward once"
            )
        if (loss_sum is None) == (mean is None) or weight is None:
            raise UsageError("call backward(loss_sum, weight) for a summed loss, or backward(mean=loss, weight=n)")
        loss = loss_sum if loss_sum is not None else mean * weight
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                f"window {self.index}: the loss must be one number in a tensor, got "
                f"{tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}; sum it over tokens"
            )
        return loss.reshape(()), weight

    def _count(self, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        exact = loss.to(self._engine.device, torch.float64)
        finite = torch.isfinite(exact)
        self._loss_sum = self._loss_sum + torch.where(finite, exact, torch.zeros_like(exact))
        self._num_bad = self._num_bad + (~finite).to(torch.float64)
        self._weight = self._weight + torch.as_tensor(weight, dtype=torch.float64, device=self._engine.device).detach()

    def _put_buffers_back(self) -> None:
        """A forward that is later skipped must leave no trace: BatchNorm would keep its infinities (DESIGN §9.2)."""
        self._copy_into_buffers(self._buffers)

    def _copy_into_buffers(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in names.buffers(self._engine.models).items():
                buffer.copy_(values[name])


_ADVICE = {
    _Phase.OPEN: "iterate over its batches first",
    _Phase.HANDING_OUT: "finish iterating over its batches first",
    _Phase.BROKEN: "the loop over its batches was left early, so its gradients were dropped",
    _Phase.DECIDED: "a window makes one update; take the next window",
}
