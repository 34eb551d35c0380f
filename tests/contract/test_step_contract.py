"""What a window promises, asked of each way to get one: a `Run` and a `Step`, in each precision that a CPU has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samerun
from samerun.errors import UsageError, WindowError
from samerun.step import Step
from samerun.step.window import Window

K, MICRO = 4, 2


class Way:
    """A model with BatchNorm and dropout, an optimizer, and windows over the same 24 samples."""

    def __init__(self, kind: str, path: Path, precision: str = "fp32") -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(2)
        self.samples = list(torch.randn(24, 3, generator=generator))
        self._kind, self._path, self._precision = kind, path, precision

    def windows(self, num_windows: int = 3) -> Iterator[Window]:
        options: dict[str, Any] = {"precision": self._precision, "max_norm": 1.0}
        if self._kind == "Step":
            step = Step(self.model, self.optimizer, **options)
            for number in range(num_windows):
                start = number * K * MICRO
                parts = [self.samples[start + i : start + i + MICRO] for i in range(0, K * MICRO, MICRO)]
                yield step.window([torch.stack(part) for part in parts])
            return
        data = samerun.Data(self.samples, global_batch=K * MICRO, micro_batch=MICRO)
        with samerun.Run(self._path, model=self.model, optimizer=self.optimizer, data=data, **options) as run:
            yield from run.windows(until=f"{num_windows * K * MICRO} samples")

    def held(self) -> list[float]:
        """Parameters and buffers."""
        return [value for tensor in self.model.state_dict().values() for value in tensor.flatten().tolist()]


@pytest.fixture(params=["Run", "Step"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def backward(window: Window, model: nn.Module, factor: float = 1.0) -> None:
    for batch in window:
        window.backward(model(batch).float().square().sum() * factor, len(batch))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_window_updates_once_and_says_what_it_was(kind: str, precision: str, tmp_path: Path) -> None:
    way = Way(kind, tmp_path, precision)
    for window in way.windows():
        assert len(window) == K
        before = way.held()
        backward(window, way.model, 1e-2)  # a first fp16 scale of 65,536 must not be one too many
        outcome = window.step()
        assert outcome.updated and outcome.weight == K * MICRO and math.isfinite(outcome.loss)
        assert outcome.grad_norm_clipped <= 1.0 + 1e-6 and way.held() != before
        assert all(parameter.grad is None for parameter in way.model.parameters())
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_skipped_window_leaves_no_trace(kind: str, precision: str, tmp_path: Path) -> None:
    way = Way(kind, tmp_path, precision)
    for window in way.windows():
        before = way.held()
        backward(window, way.model, math.inf)
        assert window.step().reason.value == "non_finite_loss"
        assert way.held() == before


def test_a_loop_left_early_leaves_no_trace_and_cannot_step(kind: str, tmp_path: Path) -> None:
    way = Way(kind, tmp_path)
    windows = way.windows()
    window = next(windows)
    before = way.held()
    for batch in window:
        window.backward(way.model(batch).sum(), len(batch))
        break
    with pytest.raises(WindowError, match="left early"):
        window.step()
    assert way.held() == before and all(parameter.grad is None for parameter in way.model.parameters())
    with pytest.raises(WindowError, match="never stepped: the loop over its batches was left early"):
        next(windows)


def test_the_order_of_calls_is_enforced(kind: str, tmp_path: Path) -> None:
    way = Way(kind, tmp_path)
    windows = way.windows()
    window = next(windows)
    with pytest.raises(WindowError, match="iterate over its batches first"):
        window.step()
    with pytest.raises(WindowError, match="backward\\(\\) without a batch"):
        window.backward(way.model(torch.stack(way.samples[:2])).sum(), 2)
    with pytest.raises(WindowError, match="no backward before the next batch"):
        list(window)
    windows.close()  # type: ignore[attr-defined]

    windows = Way(kind, tmp_path / "other").windows()
    window = next(windows)
    with pytest.raises(UsageError, match="without the count"):
        for batch in window:
            window.backward(mean=way.model(batch).mean())
    windows.close()  # type: ignore[attr-defined]
    assert not torch.is_autocast_enabled("cpu")


class HostReads(TorchDispatchMode):
    """What makes a host wait for a device: a value read, a count of elements, a copy that is not awaited apart."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.count[name] += 1
        return function(*args, **(kwargs or {}))


def reads_of_a_window(way: Way, weight: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """By samerun alone, from the first batch to the decision. torch does not dispatch `tolist`: counted apart."""
    original, lists = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(1) or original(tensor))
    monkeypatch.setattr(way.optimizer, "step", lambda: None)  # AdamW on a CPU reads its own counters
    counts = []
    for window in way.windows():
        lists.clear()
        with HostReads() as seen:
            for batch in window:
                window.backward(way.model(batch).float().square().sum(), weight(batch))
            window.step()
        counts.append(sum(seen.count.values()) + len(lists))
    return max(counts[1:])  # before a run's first scaled loss the ranks agree on its shift, once


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_host_reads_once_a_window(
    kind: str, precision: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weight(batch: torch.Tensor) -> Any:
        return len(batch) if where == "host" else torch.ones(len(batch)).sum()

    assert reads_of_a_window(Way(kind, tmp_path, precision), weight, monkeypatch) == 1


def test_control_a_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = reads_of_a_window(Way("Step", tmp_path), lambda batch: torch.ones(len(batch)).sum().item(), monkeypatch)
    assert counted == 1 + K
