"""Faults that users of other trainers reported of whole runs, each as a test named after its kind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samerun
from samerun.checkpoint import Store
from samerun.checkpoint.save.staging import Staging
from samerun.errors import ExitCode, Stopped
from samerun.preempt import Preemption
from samerun.run.faults import Deed, Fault, FaultPlan

torch.set_num_threads(1)
EPOCH = 6
"""Windows in an epoch."""


class CrashError(Exception):
    """A crash, as far as a loop can tell."""


def stay(place: str, run: samerun.Run, window: int) -> None:
    return None


Act = Callable[[str, samerun.Run, int], None]


def raise_at(where: str, window: int) -> Act:
    def act(place: str, run: samerun.Run, now: int) -> None:
        if (place, now) == (where, window):
            raise CrashError(place)

    return act


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Seven numbers each; `read` is called before each."""

    def __init__(self, read: Callable[[], None] = lambda: None) -> None:
        self.rows = torch.randn(4 * EPOCH, 7, generator=torch.Generator().manual_seed(1))
        self.read = read

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read()
        return self.rows[index]


@dataclass
class Seen:
    """What one start held at each edge, by update, and how many batches each evaluation that ended had."""

    edges: dict[int, Any] = field(default_factory=dict)
    evaluations: dict[int, list[int]] = field(default_factory=dict)


class OfTheUser:
    """A component of the user's own that tells when it is loaded and when it is saved."""

    def __init__(self, schedule: Any, told: Callable[[str], None]) -> None:
        self.schedule, self.told = schedule, told

    def state_dict(self) -> dict[str, Any]:
        self.told("save")
        return dict(self.schedule.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told("load")
        self.schedule.load_state_dict(state)


class Training:
    """Everything that makes coming back hard, one start of it: dropout, running statistics, a frozen layer, an average
    that is swapped in for evaluations, a schedule of its own that is stepped at the end of each epoch."""

    def __init__(
        self, path: Path, *, until: int = 10, act: Act = stay, seed: int = 3, every: str = "1 updates"
    ) -> None:
        self.path, self.until, self.act, self.every = path, until, act, every
        torch.manual_seed(seed)
        frozen = nn.Linear(7, 7).requires_grad_(False)
        self.model = nn.Sequential(frozen, nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Dropout(0.2), nn.Linear(13, 7))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.other = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.own = torch.optim.lr_scheduler.ExponentialLR(self.other, 0.5)
        self.validation = torch.utils.data.DataLoader(Rows(), batch_size=10, shuffle=True)
        self.seen = Seen()
        self.window = -1

    def run(self, **options: Any) -> Seen:
        rows = Rows(lambda: self.act("data", run, self.window))
        run = samerun.Run(
            self.path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            data=samerun.Data(rows, global_batch=4, micro_batch=2, seed=1),
            extra={
                "ema": self.average,
                "per_epoch": OfTheUser(self.own, lambda place: self.act(place, run, self.window)),
            },
            save_every=self.every,
            keep_last=99,
            **options,
        )
        self.optimizer.register_step_pre_hook(lambda *_: self.act("optimizer", run, self.window))
        with run:
            self.window = int(run.progress.windows)
            self.act("opening", run, self.window)
            for window in run.windows(until=self.until):
                self._note(run)
                self._window(run, window)
                self.window = window.index + 1
            self._note(run)
        return self.seen

    def _window(self, run: samerun.Run, window: Any) -> None:
        self.window = window.index
        for batch in window:
            loss = ((self.model(batch) - batch) ** 2).sum()
            loss.register_hook(lambda gradient: self.act("backward", run, window.index))
            window.backward(loss, batch.numel())
            self.act("batch", run, window.index)
        window.step()
        self.act("step", run, window.index)
        self.average.update_parameters(self.model)
        if window.index % 3 == 1:
            value = run.evaluate("loss", lambda: self._measure(run), better="max")
            self.seen.evaluations.setdefault(int(run.progress.updates), []).append(self.num_batches)
            self.act("evaluated", run, window.index)
            assert value > 0
        if (window.index + 1) % EPOCH == 0:
            self.act("epoch", run, window.index)
            self.other.step()
            self.own.step()

    def _measure(self, run: samerun.Run) -> float:
        """With the averaged weights in the model, as people do, and a shuffled loader of their own."""
        self.num_batches, total = 0, 0.0
        with self.swapped():
            for batch in self.validation:
                total += float(((self.model(batch) - batch) ** 2).sum())
                self.num_batches += 1
                if self.num_batches == 2:
                    self.act("evaluate", run, self.window)
        return total

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        mine, averages = list(self.model.parameters()), list(self.average.module.parameters())
        before = [parameter.detach().clone() for parameter in mine]
        for parameter, average in zip(mine, averages, strict=True):
            parameter.data.copy_(average)
        try:
            yield
        finally:
            for parameter, raw in zip(mine, before, strict=True):
                parameter.data.copy_(raw)

    def _note(self, run: samerun.Run) -> None:
        """Raw and averaged weights, the average's own counter, rates, counters, and what a forward gives right now."""
        self.model.eval()
        probe = self.model(torch.linspace(-1, 1, 21).view(3, 7))
        self.model.train()
        self.seen.edges[int(run.progress.updates)] = {
            "raw": [tensor.tolist() for tensor in self.model.state_dict().values()],
            "averaged": [tensor.tolist() for tensor in self.average.module.state_dict().values()],
            "n_averaged": int(self.average.n_averaged),
            "rates": [self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch, self.own.get_last_lr()],
            "progress": run.progress.to_json(),
            "probe": probe.tolist(),
        }


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samerun.storage.posix.os.fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Training(tmp_path_factory.mktemp("twin") / "run").run()


def is_part_of(twin: Seen, seen: Seen) -> bool:
    return all(record == twin.edges[update] for update, record in seen.edges.items())


def evaluations(starts: Sequence[Seen]) -> dict[int, list[int]]:
    """How many batches each evaluation had that ended, by update, in whichever start."""
    ended: dict[int, list[int]] = {}
    for seen in starts:
        for update, batches in seen.evaluations.items():
            ended.setdefault(update, []).extend(batches)
    return ended


def test_counters_and_evaluations_are_the_twins_wherever_it_was_interrupted(tmp_path: Path, twin: Seen) -> None:
    """Raised in every place of one run, in an evaluation twice: steps, epochs, averages, rates; no evaluation less."""
    assert evaluations([twin]) == {2: [3], 5: [3], 8: [3]}
    places = [("batch", 0), ("evaluate", 1), ("evaluate", 1), ("data", 2), ("backward", 2), ("optimizer", 3)]
    places += [("evaluated", 4), ("epoch", 5), ("step", 6), ("evaluate", 7)]
    starts = []
    for place, window in places:
        training = Training(tmp_path, act=raise_at(place, window))
        with pytest.raises(CrashError, match=place):
            training.run()
        assert is_part_of(twin, training.seen), place
        starts.append(training.seen)
    starts.append(Training(tmp_path).run())
    assert is_part_of(twin, starts[-1]) and max(starts[-1].edges) == max(twin.edges) == 10
    again = 5  # it was over, but the edge after it never came
    assert evaluations(starts) == {**twin.evaluations, again: [3, 3]}


def terminate(run: samerun.Run) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert run._stop.wait(20)


def terminate_at(where: str, window: int) -> Act:
    def act(place: str, run: samerun.Run, now: int) -> None:
        if (place, now) == (where, window):
            terminate(run)

    return act


def test_a_signal_in_any_place_is_met_at_an_edge_and_nothing_is_done_twice(tmp_path: Path, twin: Seen) -> None:
    """Before the first window, in a wait for data, backward, the update, an evaluation; saved at the coming edge.

    Where the ranks had agreed on the window already, the edge after it is the first that can know.
    """
    places = [("opening", 0, 0), ("data", 0, 1), ("backward", 1, 2), ("optimizer", 2, 4), ("evaluate", 4, 5)]
    places += [("load", -1, 5), ("epoch", 5, 7), ("evaluated", 7, 9)]
    starts = []
    for place, window, saved in places:
        training = Training(tmp_path, act=terminate_at(place, window), every="1000 updates")
        with pytest.raises(Stopped, match=f"stopped by SIGTERM, saved as u{saved:09d}-") as stopped:
            training.run()
        assert stopped.value.code == ExitCode.STOPPED == 75
        assert is_part_of(twin, training.seen), place
        starts.append(training.seen)
        if saved == 7:
            with pytest.raises(Stopped, match="stopped by SIGTERM, saved as u000000007-"):  # nothing new to save
                Training(tmp_path, act=terminate_at("opening", 7)).run()
    assert evaluations(starts) == twin.evaluations
    assert Training(tmp_path).run().edges[10] == twin.edges[10]


@pytest.mark.parametrize("point", ["save:staged", "save:writing", "save:committed"])
def test_a_signal_inside_a_save_is_met_and_the_save_is_whole(
    tmp_path: Path, twin: Seen, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    plan = FaultPlan(faults=(Fault(at=point, rank=0, deed=Deed.TERM, from_window=3),))
    monkeypatch.setenv("SAMERUN_FAULTS", plan.to_text())
    training = Training(tmp_path / "run")
    with pytest.raises(Stopped, match=r"stopped by SIGTERM, saved as u00000000[345]-") as stopped:
        training.run()
    assert is_part_of(twin, training.seen)
    assert f"u{max(training.seen.edges) + 1:09d}-" in stopped.value.reason, "windows were lost"
    monkeypatch.delenv("SAMERUN_FAULTS")
    assert Training(tmp_path / "run").run().edges[10] == twin.edges[10]


def test_a_stop_that_leaves_less_time_than_a_save_takes_is_not_saved_and_what_is_durable_stays(
    tmp_path: Path, twin: Seen
) -> None:
    def act(place: str, run: samerun.Run, window: int) -> None:
        if (place, window) == ("batch", 4):
            run._opened().stopping.saves.add(60.0)  # as if a save had taken a minute
            terminate(run)

    with pytest.raises(Stopped, match="not saved: a save would not fit; the newest checkpoint is u000000003-"):
        Training(tmp_path, act=act, every="3 updates").run(preemption=Preemption(warning="30 s"))
    assert Training(tmp_path).run().edges[10] == twin.edges[10]


def test_another_model_in_its_place_is_gone_after_the_resume(tmp_path: Path, twin: Seen) -> None:
    """Someone has loaded other weights, frozen ones and averages too: the first forward is that of the save."""
    Training(tmp_path, until=4).run()
    other = Training(tmp_path, seed=99)
    assert not torch.equal(other.model[0].weight, Training(tmp_path).model[0].weight)
    seen = other.run()
    assert seen.edges[4]["probe"] == twin.edges[4]["probe"]
    assert is_part_of(twin, seen)


@pytest.mark.parametrize(("by", "newest"), [("run.evaluate", 4), ("hand", 3)])
def test_averaged_weights_that_are_in_the_model_while_a_save_copies_do_not_get_into_it(
    tmp_path: Path, twin: Seen, monkeypatch: pytest.MonkeyPatch, by: str, newest: int
) -> None:
    """Evaluated before `step()`, and the copy of the edge is kept waiting until the averages are in, or may be."""
    may_copy, copy, fence = threading.Event(), Staging.late, Store.fence

    def late(staging: Staging) -> None:
        assert may_copy.wait(20)
        copy(staging)

    def fenced(store: Store) -> None:
        may_copy.set()
        fence(store)

    def measure(run: samerun.Run) -> float:
        with training.swapped():
            run._opened().saving.fence()
        return 0.0

    def act(place: str, run: samerun.Run, window: int) -> None:
        if (place, window) == ("step", 3):
            may_copy.clear()
        elif (place, window) == ("data", 4) and not may_copy.is_set():
            run.evaluate("other", lambda: measure(run)) if by == "run.evaluate" else measure(run)
        elif (place, window) == ("step", 4):
            raise CrashError

    monkeypatch.setattr(Staging, "late", late)
    monkeypatch.setattr(Store, "fence", fenced)
    training = Training(tmp_path, act=act)
    with pytest.raises(CrashError):
        training.run()
    assert int(Store(tmp_path).catalog().entries[0].progress.updates) == newest
    seen = Training(tmp_path).run()
    assert min(seen.edges) == newest and is_part_of(twin, seen)
