"""One window as the user's loop sees it: an iterable of batches, `backward` for each, `step` once at the end.

    for batch in window:                     autocast entered, gradient sync set for this forward
        loss_sum, weight = loss_fn(model, batch)
        window.backward(loss_sum, weight)    autocast left first, then backward; a bad loss still takes part
    outcome = window.step()                  agree, unscale, check, clip, update or skip

A window is decided or it never happened. Leaving the loop early, a batch without backward, or a second step raise
WindowError; the gradients are dropped and nothing is committed.

With several optimizers (a GAN) each has its own loss and its own decision: `backward(…, of="d")`, `step("d")`. A loss
leaves gradients with its own optimizer only, whichever models it ran through; the last optimizer closes the window.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NoReturn, Protocol

import torch

from samerun.errors import UsageError, WindowError
from samerun.state.model import KeptBuffers
from samerun.state.rng import preserved_rng, seed_at
from samerun.step.engine import Engine, Updater
from samerun.step.options import ModelRng, Objective
from samerun.step.outcome import Decision, Outcome
from samerun.step.parallel.agree import Agreed, Flags, Share, Tally
from samerun.step.parallel.filler import ForwardRecorder
from samerun.step.precision import Autocast


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


class WindowDropped(Exception):  # noqa: N818  # what happens, not a fault
    """Raised by `at` before a microbatch: all ranks drop the open window there.

    Once its gradients are dropped and its buffers put back, `then` is called, which ends the run.
    """

    def __init__(self, then: Callable[[], NoReturn]) -> None:
        super().__init__("dropped before its end")
        self.then = then


class _Phase(Enum):
    OPEN = "not started"
    HANDING_OUT = "handing out batches"
    EXHAUSTED = "ready to step"
    STEPPING = "inside step()"
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
        decided: Callable[[Decision], None],
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
        self._had_backward: set[str] | None = None
        """Which optimizers this batch had a loss for; None where there is no batch."""
        self._length = len(range(engine.topology.replica, data.num_microbatches, engine.topology.num_replicas))
        self._autocast = Autocast(engine.options.precision, engine.device)
        self._recorder = ForwardRecorder(engine.models)
        self._buffers = KeptBuffers(engine.models)
        self._tallies = {name: Tally(engine.device) for name in engine.updaters}
        self._outcomes: dict[str, Outcome] = {}
        self._is_last = False
        self._num_samples = 0
        self._coverage = 0

    @property
    def is_decided(self) -> bool:
        return self._phase is _Phase.DECIDED

    def require_decided(self) -> None:
        """Before the next window. Raises WindowError that says what is missing."""
        if not self.is_decided:
            raise WindowError(f"window {self.index} was taken but never stepped: {_ADVICE[self._phase]}")

    def __len__(self) -> int:
        """How many batches this rank's loop sees."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._phase is not _Phase.OPEN:
            raise WindowError(f"window {self.index} was iterated before ({self._phase.value}); take the next window")
        self._phase = _Phase.HANDING_OUT
        self._engine.drop_gradients()
        if self._engine.noise is not None:
            self._engine.noise.begin(self.index, self._engine.device)
        try:
            yield from self._hand_out()
            self._had_backward = None
            self._fill()
            self._phase = _Phase.EXHAUSTED
        except WindowDropped as dropped:
            self._leave()
            dropped.then()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Nothing that was set for the forwards stays set; a window that was left early leaves no trace."""
        self._autocast.close()
        self._engine.sync.reset()
        self._recorder.forget()
        if self._phase is _Phase.HANDING_OUT:
            self._phase = _Phase.BROKEN
            self._engine.drop_gradients()
            self._buffers.put_back()

    def backward(
        self,
        loss_sum: torch.Tensor | None = None,
        weight: torch.Tensor | float | None = None,
        *,
        mean: torch.Tensor | None = None,
        of: str | None = None,
    ) -> None:
        """Backward of one batch's `loss_sum`: the sum over its `weight` supervised tokens (or examples).

        `mean=loss, weight=n` is the same for a loss that is a mean over n. `weight` may be a 0-dim tensor on the
        device. `of` names the optimizer where there are several; its losses may also follow after the last batch. No
        host synchronisation but once, before the first scaled loss of a run. Raises WindowError outside a batch,
        UsageError for what is no scalar loss that depends on a trained parameter.
        """
        self._autocast.close()
        name, updater = self._engine.updater(of)
        loss, weight = self._one_loss(loss_sum, weight, mean, name)
        if not loss.requires_grad:
            raise UsageError(
                f"window {self.index}: the loss depends on no trained parameter (requires_grad is False); was it "
                f"computed under torch.no_grad(), or detached?"
            )
        self._tallies[name].add(loss, weight)
        updater.expect(weight, max(1, self._length))
        if self._is_last:
            self._at(f"window:{self.index}.last_backward")  # from here on a rank may wait for its peers
        if len(self._engine.updaters) == 1:
            torch.autograd.backward(updater.loss_scale.scaled(loss))
        else:
            with self._others_untouched(name):
                torch.autograd.backward(updater.loss_scale.scaled(loss))
        self._after_backward(updater, weight)
        if self._had_backward is not None and len(self._had_backward) < len(self._engine.updaters):
            self._autocast.open()  # the same batch serves another optimizer's loss

    def record(self, loss_sum: torch.Tensor, weight: torch.Tensor | float, *, of: str | None = None) -> None:
        """Counts a batch whose backward the user's code ran itself, on exactly this `loss_sum`."""
        self._autocast.close()
        name, updater = self._engine.updater(of)
        if updater.loss_scale.enabled:
            raise UsageError(
                f"window {self.index}: record() cannot be used with precision='fp16', where the loss must be scaled "
                f"before backward; use window.backward(loss_sum, weight)"
            )
        loss, weight = self._one_loss(loss_sum, weight, None, name)
        self._tallies[name].add(loss, weight)
        self._after_backward(updater, weight)

    def step(self, of: str | None = None) -> Outcome:
        """Decides the window with all ranks, for the optimizer `of` where there are several. Collective.

        Raises WindowError unless every batch had its backward, and for a second step.
        """
        if self._phase is not _Phase.EXHAUSTED:
            raise WindowError(f"window {self.index}: step() while it is {self._phase.value}; {_ADVICE[self._phase]}")
        name, updater = self._engine.updater(of)
        if name in self._outcomes:
            raise WindowError(f"window {self.index}: a second step({name!r}); each optimizer steps once per window")
        self._at(f"window:{self.index}.step")
        self._phase = _Phase.STEPPING
        outcome, agreed = updater.decide(self._share(name))
        self._phase = _Phase.EXHAUSTED
        self._outcomes[name] = outcome
        if not outcome.updated:
            self._buffers.put_back()
        if len(self._outcomes) == len(self._engine.updaters):
            self._close(agreed)
        return outcome

    def _after_backward(self, updater: Updater, weight: torch.Tensor | float) -> None:
        updater.after_backward()
        if self._engine.noise is not None:
            self._engine.noise.after_backward(updater.trained, weight, last=self._is_last)

    def _close(self, agreed: Agreed) -> None:
        self._phase = _Phase.DECIDED
        self._decided(Decision(outcomes=self._outcomes, agreed=agreed))

    def _share(self, name: str) -> Share:
        return Share(
            sums=self._tallies[name].sums(),
            num_samples=self._num_samples,
            coverage=self._coverage,
            flags=self._flags(),
            noise=self._engine.noise.share() if self._engine.noise is not None else None,
        )

    def _hand_out(self) -> Iterator[Any]:
        last_slot = (self._data.slots if self._engine.sync.forwards_must_match else self._length) - 1
        for slot, microbatch in enumerate(self._data):
            self._at(f"window:{self.index}.microbatch:{slot}")
            self._num_samples += microbatch.num_samples
            self._coverage = (self._coverage + microbatch.coverage) % 2**64
            self._is_last = slot == last_slot
            self._engine.sync.before_forward(last=self._is_last, first=slot == 0)
            if slot == self._length - 1 and slot < last_slot:
                self._recorder.start()
            self._had_backward = set()
            if self._engine.options.rng is ModelRng.BY_POSITION:
                topology = self._engine.topology
                seed_at(self._engine.options.seed, self.index, slot * topology.num_replicas + topology.replica)
            self._autocast.open()
            yield microbatch.value
            self._autocast.close()
            if not self._had_backward:
                raise WindowError(
                    f"window {self.index}, batch {slot} of {self._length}: no backward before the next batch; call "
                    f"window.backward(loss_sum, weight) once for each batch (weight 0 for an empty one)"
                )

    def _fill(self) -> None:
        """Forwards without data where sharded peers have one more microbatch than this rank."""
        missing = self._data.slots - self._length if self._engine.sync.forwards_must_match else 0
        if not missing:
            return
        self._recorder.stop()
        kept = KeptBuffers(self._engine.models)
        for remaining in reversed(range(missing)):
            self._is_last = remaining == 0
            self._engine.sync.before_forward(last=self._is_last)
            with preserved_rng(), self._engine.options.precision.autocast(self._engine.device):
                self._recorder.replay()
            for updater in self._engine.updaters.values():
                self._after_backward(updater, 0.0)  # sharded peers' data arrives in this rank's shard
        kept.put_back()

    def _one_loss(
        self, loss_sum: torch.Tensor | None, weight: torch.Tensor | float | None, mean: torch.Tensor | None, name: str
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The summed loss as a 0-dim tensor and its weight; notes that this batch had its loss of `name`."""
        if weight is None and mean is not None and self._engine.options.objective is Objective.MICROBATCH_MEAN:
            weight = 1
        if (loss_sum is None) == (mean is None) or weight is None:
            raise UsageError(
                "call backward(loss_sum, weight) for a summed loss, or backward(mean=loss, weight=n) for a mean over n "
                "tokens: without the count a window of unequal batches cannot be averaged right"
            )
        _check_weight(weight, f"window {self.index}")
        loss: Any = loss_sum if mean is None else _summed(mean, weight)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_meta:
            raise UsageError(
                f"window {self.index}: the loss must be one number in a tensor, got "
                f"{_described(loss)}; sum it over tokens"
            )
        if loss.is_complex():
            raise UsageError(f"window {self.index}: the loss is complex ({loss.dtype}); a loss is a real number")
        self._note_backward(name)
        return (loss.reshape(()) if loss.ndim else loss), weight

    def _note_backward(self, name: str) -> None:
        if self._had_backward is not None and name not in self._had_backward:
            self._had_backward.add(name)
            return
        afterwards = self._phase is _Phase.EXHAUSTED and name not in self._outcomes
        if not (afterwards and len(self._engine.updaters) > 1):
            raise WindowError(
                f"window {self.index}: backward() without a batch, or a second one for the same batch; add the parts "
                f"of a batch's loss and call backward once"
            )

    @contextlib.contextmanager
    def _others_untouched(self, name: str) -> Iterator[None]:
        """A generator's loss runs through the discriminator and must leave no gradients there."""
        others = [
            parameter
            for other, updater in self._engine.updaters.items()
            if other != name
            for parameter in updater.trained
        ]
        gradients = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(others, gradients, strict=True):
                parameter.grad = gradient


def _check_weight(weight: Any, where: str) -> None:
    """What can be checked without waiting for the device; the value of a tensor is judged at the window's end."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex() or weight.is_meta:
            raise UsageError(
                f"{where}: weight is {_described(weight)}; it must be one number, "
                f"how many tokens the loss was summed over: weight.sum()"
            )
    elif not isinstance(weight, numbers.Real) or not 0 <= float(weight) < float("inf"):
        raise UsageError(f"{where}: weight={weight!r} must be a finite number of tokens, 0 or more")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    where = " on the device 'meta', which holds no values" if value.is_meta else ""
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}{where}"


def _summed(mean: Any, weight: torch.Tensor | float) -> Any:
    """The sum behind a mean; 0 for a mean over nothing, which is NaN."""
    if not isinstance(mean, torch.Tensor):
        return mean
    total = (mean.float() if mean.dtype in (torch.float16, torch.bfloat16) else mean) * weight
    counted = weight > 0 if isinstance(weight, torch.Tensor) else torch.full_like(total, weight > 0, dtype=torch.bool)
    return torch.where(counted, total, torch.zeros_like(total))


_ADVICE = {
    _Phase.OPEN: "iterate over its batches first",
    _Phase.HANDING_OUT: "finish iterating over its batches first",
    _Phase.EXHAUSTED: "call step() once per window, and for each optimizer",
    _Phase.BROKEN: "the loop over its batches was left early and its gradients dropped; go back to the last checkpoint",
    _Phase.STEPPING: "an earlier call raised and may have changed some parameters; go back to the last checkpoint",
    _Phase.DECIDED: "a window makes one update; take the next window",
}
