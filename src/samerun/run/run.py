"""`Run`: one training, however many processes and days it takes.

with run:                                start: fresh, resumed, fallen back or refused
    for window in run.windows(until=N):  each turn is an edge: save if due, stop if agreed, then a window
        for batch in window: ...
        window.step()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samerun.core import environ
from samerun.core.progress import Progress
from samerun.data.source import as_source
from samerun.errors import Refused, Stop, UsageError
from samerun.health.options import HealthOptions, Mode
from samerun.plan.run import RunPlan
from samerun.preempt.budget import Preemption
from samerun.preempt.flag import SignalWatch, StopFlag
from samerun.preempt.sources import SourceWatch
from samerun.run.attempt import EVALUATE, Attempt
from samerun.run.config import OnSaveError, RunConfig, SaveOptions, as_table
from samerun.run.ending import last_words
from samerun.run.ending.stopping import warning_seconds
from samerun.run.goal import Goal, SaveInterval
from samerun.run.preamble import Preamble
from samerun.run.starting.announce import say
from samerun.run.starting.opening import open_attempt
from samerun.state.extra import Stateful
from samerun.state.rng import preserved_rng
from samerun.state.schedule import SchedulerLike
from samerun.step.noise import NoiseEstimate
from samerun.step.options import ModelRng, Objective, StepOptions
from samerun.step.parallel.sync import Accumulate
from samerun.step.parts import TrainedParts
from samerun.step.precision import Precision
from samerun.step.schedule import Clock, Curve
from samerun.step.window import Window


class Run:
    """A training run that lives at `path` and comes back as the same run.

    Guarantee: after any interruption, the next sample, learning rate, random draw and update are those of the
    uninterrupted run; bitwise on the same number of ranks, software and numeric settings with deterministic kernels,
    else within float tolerance, and the start line says which and why. It ends where state hides from Run: objects not
    given to it (`extra=`), generators other than Python's, NumPy's and torch's global ones, and anything outside the
    process. `path` must be on storage that every rank sees. On a resume the program's lines between `with run:` and
    the first window come a second time: they move no random stream, and loading state there raises UsageError.

    Saves run beside training (`background=False`: in its way). Between an edge and `window.step()` a loop body must not
    change weights or optimizer state in place: a save that is still copying them then notices, is thrown away and made
    again at the next edge, and from then on copies before training goes on. A save that failed says so on every rank
    at the next edge: `on_save_error="stop"` raises SaveFailedError there, "continue" trains on and saves again at the
    next interval. `max_staging_bytes` bounds the memory for copies on each rank; a save that needs more waits.

    Raises Refused (exit 4) when the path holds another run, UsageError for options that cannot work.
    """

    def __init__(  # the options of a whole training; each is a word of its own and has a default where one is safe
        self,
        path: str | Path,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        data: Any,
        scheduler: SchedulerLike | Curve | Mapping[str, SchedulerLike | Curve] | None = None,
        extra: Mapping[str, Stateful] | None = None,
        identity: Mapping[str, Any] | None = None,
        mesh: DeviceMesh | None = None,
        precision: str | Precision = Precision.FP32,
        accumulate: str | Accumulate = Accumulate.SHARDED,
        objective: str | Objective = Objective.TOKEN_MEAN,
        clock: str | Clock = Clock.UPDATES,
        max_norm: float | None = None,
        noise_every: int | None = None,
        rng: str | ModelRng = ModelRng.STREAMS,
        save_every: str = "10 min",
        keep_last: int = 5,
        background: bool = True,
        on_save_error: str | OnSaveError = OnSaveError.STOP,
        max_staging_bytes: int | None = None,
        waive: Sequence[str] = (),
        remap: str | Clock | None = None,
        preemption: Preemption | None = None,
        plan: RunPlan | None = None,
        health: str | Mode | HealthOptions = Mode.OBSERVE,
    ) -> None:
        source = as_source(data)
        parts = TrainedParts.of(
            model, optimizer, scheduler, Clock.parse(clock, option="clock"), may_change=remap is not None
        )
        self._config = RunConfig(
            path=environ.run_path_override() or _path(path),
            parts=parts,
            source=source,
            extra=as_table(extra, option="extra"),
            identity=as_table(identity, option="identity"),
            mesh=mesh,
            step=StepOptions(
                precision=Precision.parse(precision, option="precision"),
                objective=Objective.parse(objective, option="objective"),
                accumulate=Accumulate.parse(accumulate, option="accumulate"),
                max_norm=max_norm,
                noise_every=noise_every,
                rng=ModelRng.parse(rng, option="rng"),
                seed=int(source.identity().get("seed", 0)),
            ),
            saves=SaveOptions(
                interval=SaveInterval.parse(save_every),
                keep_last=keep_last,
                background=background,
                on_error=OnSaveError.parse(on_save_error, option="on_save_error"),
                max_staging_bytes=max_staging_bytes,
            ),
            waive=(waive,) if isinstance(waive, str) else tuple(waive),
            remap=None if remap is None else Clock.parse(remap, option="remap"),
            preemption=preemption or Preemption(),
            plan=plan,
            health=HealthOptions.parse(health),
        )
        self._stop = StopFlag()
        self._watching = contextlib.ExitStack()
        self._attempt: Attempt | None = None
        self._preamble: Preamble | None = None
        self._at_edge = True

    @property
    def path(self) -> str:
        return self._config.path

    @property
    def progress(self) -> Progress:
        """Counters of everything decided so far: windows, skipped, updates, samples, tokens."""
        return self._opened().progress

    def __enter__(self) -> Self:
        self._watch()
        try:
            self._attempt = open_attempt(self._config, self._stop)
            self._preamble = Preamble(self._config, self._attempt.started)
        except BaseException as error:
            if isinstance(error, Refused) and environ.launcher().rank in (None, 0):
                say(error.reason)  # a SystemExit ends the script without a word
            self._let_go(error, window=None, batch=None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        attempt = self._opened()
        window = int(attempt.progress.windows)
        try:
            if error is None:
                if self._at_edge:
                    attempt.edge(None)
                attempt.journal.write("closed", progress=attempt.progress.to_json())
            else:
                attempt.failed(error)
                attempt.journal.write("left", error=repr(error), progress=attempt.progress.to_json())
        finally:
            attempt.close(error)
            self._attempt = None
            self._let_go(error, window=window, batch=attempt.open_batch)

    def windows(self, until: int | str) -> Iterator[Window]:
        """The windows of the run up to `until`: 2000 (updates), "1e9 tokens", "3 epochs". Each turn is an edge.

        What the loop body does after `step()` is inside the state that the next turn saves. Raises WindowError when a
        window was neither stepped nor finished, Stopped (exit 75) after an agreed stop, once the state is saved.
        """
        attempt = self._opened()
        goal = Goal.parse(until, samples_per_epoch=self._config.source.samples_per_epoch)
        if goal.is_reached(attempt.progress):
            self._say(f"already at {goal.describe(attempt.progress)}: raise until, or use a new path; nothing to do")
        if self._preamble is not None:
            self._preamble.end()
        with preserved_rng():
            source = iter(self._config.source.windows())
        while attempt.edge(goal):
            window = attempt.window(next(source))
            self._at_edge = False
            yield window
            window.require_decided()
            self._at_edge = True

    def evaluate(self, name: str, measure: Callable[[], float | torch.Tensor], *, better: str | None = None) -> float:
        """Runs `measure` in eval mode without gradients, puts every random stream back; returns its mean over ranks.

        The value is recorded under `name`; with `better="min"` or `"max"` an improvement is saved at the coming edge
        and tagged `best`. A ReduceLROnPlateau scheduler is stepped with the value. Collective.
        """
        attempt = self._opened()
        attempt.enter(EVALUATE)
        attempt.saving.fence()  # `measure` may well put averaged weights in for a while
        with preserved_rng(), torch.no_grad(), _in_eval_mode(self._config.models.values()):
            mine = float(measure())
        value = attempt.mean_over_ranks(mine)
        for scheduler in self._config.schedulers.values():
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)
        attempt.evaluated(name, value, better=better)
        attempt.enter("loop body")
        return value

    def alive(self) -> bool:
        """A sign of life from a long section of your own (a validation pass, an export): call it now and then there.

        Local, never a collective: ranks may call it as often as they like. It tells the watch for hangs that this rank
        is busy, and counts as a look at notices. Returns True once this rank was told to stop: end the section soon if
        the run may do without the rest of it (an evaluation may not: its value is part of the run). The stop itself is
        agreed on by all ranks, and saved, at the next edge. Raises UsageError where the run is not open.
        """
        return self._opened().alive()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The run's precision for code outside a window's batches, such as an evaluation."""
        device = next(next(iter(self._config.models.values())).parameters()).device
        return self._config.step.precision.autocast(device)

    def noise(self) -> NoiseEstimate:
        """The gradient noise scale measured so far. Raises UsageError unless `noise_every=` was given."""
        return self._opened().noise()

    def _watch(self) -> None:
        """Signals and polled notices, from here until the run is left."""
        preemption = self._config.preemption
        signals = SignalWatch(self._stop, warning_seconds=warning_seconds(preemption, environ.launcher()))
        if not signals.install() and not preemption.sources:
            say(
                "not in the main thread: signals cannot be watched here; give Preemption(sources=…) to be told of stops"
            )
        self._watching.callback(signals.remove)
        sources = SourceWatch(self._stop, preemption.sources, say=say)
        sources.start()
        self._watching.callback(sources.stop)

    def _let_go(self, error: BaseException | None, *, window: int | None, batch: str | None) -> None:
        self._config.source.close()
        self._watching.close()
        if isinstance(error, Stop):
            last_words.leave(environ.launcher(), error)
        elif isinstance(error, Exception):
            last_words.confess(environ.launcher(), error, window=window, batch=batch)

    def _opened(self) -> Attempt:
        if self._attempt is None:
            raise UsageError("the run is not open; write `with run:` around the loop")
        return self._attempt

    def _say(self, line: str) -> None:
        if self._opened().leads:
            say(line)


def _path(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"the run's path is {path!r}; write a folder or a URL, such as 'runs/first'")
    return os.fspath(path)


@contextlib.contextmanager
def _in_eval_mode(models: Any) -> Iterator[None]:
    modules = [module for model in models for module in model.modules()]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
