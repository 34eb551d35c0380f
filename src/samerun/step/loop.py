"""`samerun.step.Step`: the safe update for people who keep their own loop, data and checkpoints.

    step = Step(model, optimizer, precision="fp16", max_norm=1.0)
    for batches in my_windows:                 # a list of this rank's microbatches
        window = step.window(batches)
        for batch in window:
            loss_sum, weight = loss_fn(model, batch)
            window.backward(loss_sum, weight)
        outcome = window.step()

The same engine as `samerun.Run`, in one process, under DDP or FSDP2. What it guarantees is one update: agreed by all
ranks, of the objective's gradient, skipped without a trace. It does not guarantee that a resumed run is the same run:
the data, the random streams and the checkpoint are the caller's. `state_dict()` holds what the step itself remembers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from samerun.core import environ
from samerun.core.choice import whole_number
from samerun.core.progress import Progress
from samerun.errors import UsageError
from samerun.ranks.topology import topology_of
from samerun.step.engine import Engine
from samerun.step.noise import NoiseEstimate
from samerun.step.options import Objective, StepOptions
from samerun.step.outcome import Decision
from samerun.step.parallel.agree import Flags, max_over_ranks
from samerun.step.parallel.sync import Accumulate, settle_bucket_order
from samerun.step.parts import TrainedParts
from samerun.step.precision import Precision
from samerun.step.schedule import Clock, ClockedSchedule, lr_setters, remap_loaded, require_choice, step_schedulers
from samerun.step.skip_rate import SkipRate
from samerun.step.window import Window


class Step:
    """Windows over microbatches that the caller brings.

    `model`, `optimizer` and `scheduler` take one object or a dict by name. `scheduler` is a torch scheduler (stepped
    once per update; ReduceLROnPlateau stays the caller's) or a curve of `samerun.step.schedule` on `clock`. The other
    options are those of `Run`. `global_batch`: samples in a window over all replicas; all it does is that a state saved
    with another one is not taken in silence. Collective under DDP and FSDP2: every rank makes one. Raises UsageError
    for options that cannot work, Refused for ranks whose models are not tied together.
    """

    def __init__(  # the options of a whole training, as Run has them
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        scheduler: Any = None,
        clock: str | Clock = Clock.UPDATES,
        mesh: DeviceMesh | None = None,
        precision: str | Precision = Precision.FP32,
        objective: str | Objective = Objective.TOKEN_MEAN,
        accumulate: str | Accumulate = Accumulate.SHARDED,
        max_norm: float | None = None,
        noise_every: int | None = None,
        global_batch: int | None = None,
    ) -> None:
        self._global_batch = _batch_said(global_batch)
        parts = TrainedParts.of(model, optimizer, scheduler, Clock.parse(clock, option="clock"))
        self._topology = topology_of(parts.models.values(), mesh=mesh, launcher=environ.launcher())
        self._schedulers = parts.schedulers
        self._engine = Engine(
            models=parts.models,
            optimizers=parts.optimizers,
            topology=self._topology,
            options=StepOptions(
                precision=Precision.parse(precision, option="precision"),
                objective=Objective.parse(objective, option="objective"),
                accumulate=Accumulate.parse(accumulate, option="accumulate"),
                max_norm=max_norm,
                noise_every=noise_every,
            ),
            before_update=lr_setters(parts.schedulers, parts.optimizers, lambda: self.progress),
        )
        settle_bucket_order(parts.models)
        self.progress = Progress()
        """Windows, skipped, updates, samples and tokens so far. `samples` counts microbatches unless the window is
        told how many samples each holds."""
        self.skip_rate = SkipRate()
        self.alerts: list[str] = []
        """One sentence for each time the skip rate crossed 5 %."""
        self.remapped: list[str] = []
        """What the last load_state_dict changed about the schedules, before and after; also said on standard error."""
        self._open: Window | None = None

    def window(self, batches: Sequence[Any], *, num_samples: Sequence[int] | None = None) -> Window:
        """One attempted update over this rank's own `batches` (at least one), handed out again by the window.

        `num_samples`: samples in each, for the sample clock. Under FSDP2 ranks may bring unequal numbers of batches;
        agreeing on the largest costs one small collective. Raises WindowError while the last window is undecided.
        """
        if self._open is not None:
            self._open.require_decided()
        sizes = _sizes(batches, num_samples)
        slots = len(batches)
        if self._engine.sync.forwards_must_match:
            slots = max_over_ranks(len(batches), self._engine.device)
            if len(self._engine.updaters) > 1:
                fewest = -max_over_ranks(-len(batches), self._engine.device)
                self._engine.require_even(is_even=fewest == slots)
        self._open = Window(
            self._engine,
            _Batches(
                items=[_Batch(value=value, num_samples=size) for value, size in zip(batches, sizes, strict=True)],
                replica=self._topology.replica,
                num_replicas=self._topology.num_replicas,
                slots=slots,
            ),
            index=int(self.progress.windows),
            flags=Flags,
            decided=self._decided,
            at=_nowhere,
        )
        return self._open

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The step's precision for code outside a window's batches, such as an evaluation."""
        return self._engine.options.precision.autocast(self._engine.device)

    def noise(self) -> NoiseEstimate:
        """The gradient noise scale measured so far. Raises UsageError unless `noise_every` was given."""
        if self._engine.noise is None:
            raise UsageError("nothing is measured: pass noise_every=10 (windows)")
        return self._engine.noise.estimate()

    def state_dict(self) -> dict[str, Any]:
        """Plain values only: counters, loss scale, schedules, skip rate. Save it beside model and optimizer."""
        return {
            "progress": self.progress.to_json(),
            "scaler": self._engine.scaler_state(),
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self._schedulers.items()},
            "skips": self.skip_rate.state_dict(),
            "noise": self._engine.noise.state_dict() if self._engine.noise is not None else None,
            "global_batch": self._global_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, remap: str | Clock | None = None) -> None:
        """What `state_dict` returned. `remap`, as for `Run`: what another batch, curve, horizon or clock shall mean.

        Raises UsageError when precision, optimizers or schedulers were others, MismatchError for another curve or clock
        without `remap`, UsageError for another `global_batch` without it where a schedule counts updates. Nothing but
        schedules may have been loaded then.
        """
        counter = None if remap is None else Clock.parse(remap, option="remap")
        progress = Progress.from_json(state["progress"])
        if set(state["schedulers"]) != set(self._schedulers):
            raise UsageError(
                f"the state holds the schedulers {sorted(state['schedulers'])}, this step has "
                f"{sorted(self._schedulers)}; give the same ones under the same names"
            )
        batch = _batch_change(state.get("global_batch"), self._global_batch)
        require_choice(self._schedulers, progress, remap=counter, batch=batch)
        for name, scheduler in self._schedulers.items():
            if isinstance(scheduler, ClockedSchedule):
                scheduler.may_change = counter is not None
            scheduler.load_state_dict(state["schedulers"][name])
        self._engine.load_scaler_state(dict(state["scaler"]))
        self.progress = progress
        self.remapped = remap_loaded(self._schedulers, progress, remap=counter, batch=batch)
        for line in self.remapped if self._topology.rank == 0 else ():
            print(f"samerun: {line}", file=sys.stderr)
        self.skip_rate.load_state_dict(state["skips"])
        if self._engine.noise is not None and state["noise"] is not None:
            self._engine.noise.load_state_dict(state["noise"])

    def _decided(self, decision: Decision) -> None:
        self.progress = decision.progress_after(self.progress)
        alert = self.skip_rate.after(skipped=bool(decision.skipped), weight=decision.weight)
        if alert is not None:
            self.alerts.append(alert)
        step_schedulers(self._schedulers, decision)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    value: Any
    num_samples: int
    coverage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """This rank's own batches, in the terms in which a window counts: numbers over all replicas, dealt out in turn."""

    items: Sequence[_Batch]
    replica: int
    num_replicas: int
    slots: int

    @property
    def num_microbatches(self) -> int:
        return (len(self.items) - 1) * self.num_replicas + self.replica + 1

    def __iter__(self) -> Iterator[_Batch]:
        return iter(self.items)


def _sizes(batches: Any, num_samples: Any) -> list[int]:
    """How many samples each batch has. Raises UsageError for what is no list of batches with their numbers."""
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise UsageError(
            f"window() got a {type(batches).__name__}; give a list of this rank's microbatches, such as list(batches) "
            f"or list(torch.split(batch, 2))"
        )
    if not batches:
        raise UsageError("a window needs at least one batch on every rank; give weight 0 to an empty one")
    sizes = [1] * len(batches) if num_samples is None else num_samples
    if not isinstance(sizes, Sequence) or len(sizes) != len(batches):
        got = f"{len(sizes)} entries" if isinstance(sizes, Sequence) else f"a {type(sizes).__name__}"
        raise UsageError(f"num_samples has {got} for {len(batches)} batches; give one number for each")
    return [whole_number(size, option="num_samples", at_least=0) for size in sizes]


def _batch_said(global_batch: Any) -> int | None:
    return None if global_batch is None else whole_number(global_batch, option="global_batch", at_least=1)


def _batch_change(saved: int | None, now: int | None) -> str | None:
    """In words; None where it stayed, or where the state does not say what it was. Raises UsageError where it did."""
    if saved is not None and now is None:
        raise UsageError(f"the state was saved with global_batch={saved}, and this step was not told any; say it again")
    return None if saved is None or saved == now else f"global_batch was {saved} and is now {now}"


def _nowhere(_: str) -> None:
    return None
