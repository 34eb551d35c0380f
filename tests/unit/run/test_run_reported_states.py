"""Faults that users of other trainers reported of what a resume brings back, each as a test named after its kind."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samerun
from samerun.checkpoint import Store
from samerun.errors import Refused, UsageError

torch.set_num_threads(1)
Act = Callable[[nn.Module, int], None]
SAMPLES = torch.randn(24, 7, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samerun.storage.posix.os.fsync", lambda descriptor: None)


def train(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    until: int = 6,
    act: Act = lambda model, update: None,
    preamble: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[tuple[float, list[float]]]:
    """One start: (rate inside the update, output of a forward at the edge before it) for each of its windows."""
    seen = []
    data = samerun.Data(list(SAMPLES), global_batch=4, micro_batch=2, seed=1)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every="1 updates", **options)
    with run:
        preamble()
        for window in run.windows(until=until):
            with torch.no_grad():
                probe = model(SAMPLES[:3].to(next(model.parameters()).dtype)).flatten().tolist()
            for batch in window:
                out = model(batch.to(next(model.parameters()).dtype)).float()
                window.backward(((out - batch) ** 2).sum(), batch.numel())
            seen.append((window.step().lr, probe))
            act(model, int(run.progress.updates))
    return seen


def resumed(
    path: Path, start: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], cuts: Sequence[int], **options: Any
) -> list[Any]:
    """As `train`, resumed at each of `cuts`."""
    seen = []
    for until in cuts:
        seen += train(path, *start(), until=until, **options)
    return seen


# ---- masters and compute weights


class MasterSGD(torch.optim.Optimizer):
    """Keeps float32 masters and momentum of bfloat16 parameters, as mixed-precision optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["momentum"] = torch.zeros_like(state["master"])
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(group["lr"] * state["momentum"])
                parameter.copy_(state["master"])


def low() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)).bfloat16()
    return model, MasterSGD(model.parameters(), lr=0.01)


def test_masters_are_not_rebuilt_from_low_precision_weights_in_five_resumes(tmp_path: Path) -> None:
    """And the first forward after each load is that of the save, without an update in between."""
    twin = train(tmp_path / "twin", *low())
    assert resumed(tmp_path / "run", low, range(1, 7)) == twin
    rebuilt = resumed(tmp_path / "other", low, (3, 6), waive=("moments",))
    assert rebuilt != twin, "it would not have been noticed"


# ---- between the start and the first window


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.5), nn.Linear(13, 7))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_what_a_program_draws_or_seeds_before_its_first_window_moves_no_stream_of_a_resumed_run(tmp_path: Path) -> None:
    def looks_at_samples() -> None:
        torch.randn(5), np.random.rand(), random.random()

    def seeds() -> None:
        torch.manual_seed(7), np.random.seed(7), random.seed(7)

    for number, preamble in enumerate((looks_at_samples, seeds)):
        twin = train(tmp_path / f"twin-{number}", *plain(), preamble=preamble)
        assert resumed(tmp_path / f"run-{number}", plain, (1, 3, 6), preamble=preamble) == twin


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_that_is_loaded_over_what_was_restored_is_an_error_and_nothing_is_saved(
    tmp_path: Path, assign: bool
) -> None:
    """Inside `with run:`, as scripts do that begin from a pretrained model: right the first time, and never again."""

    def start() -> list[Any]:
        model, optimizer = plain()
        pretrained = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
        return [model, optimizer, lambda: model.load_state_dict(pretrained, assign=assign and again)]

    again = False
    model, optimizer, load = start()
    train(tmp_path, model, optimizer, until=3, preamble=load)
    before = [entry.name for entry in Store(tmp_path).catalog().entries]
    again = True
    model, optimizer, load = start()
    with pytest.raises(UsageError, match=r"written to between.*0\.weight.*restored from u000000003-"):
        train(tmp_path, model, optimizer, preamble=load)
    assert [entry.name for entry in Store(tmp_path).catalog().entries] == before
    assert len(train(tmp_path, *plain())) == 3


def test_weights_that_are_swapped_and_put_back_before_the_first_window_are_no_error(tmp_path: Path) -> None:
    """Averaged weights for a first evaluation; what is not put back bit for bit is one."""

    def swap(model: nn.Module, *, off_by: float) -> None:
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in kept.items()})
        model.load_state_dict({name: tensor + off_by for name, tensor in kept.items()})

    train(tmp_path, *plain(), until=3)
    model, optimizer = plain()
    with pytest.raises(UsageError, match="written to between"):
        train(tmp_path, model, optimizer, preamble=lambda: swap(model, off_by=1e-3))
    model, optimizer = plain()
    after = train(tmp_path, model, optimizer, preamble=lambda: swap(model, off_by=0.0))
    assert after == train(tmp_path / "twin", *plain())[3:]


@pytest.mark.parametrize("what", ["optimizer", "schedule", "data"])
def test_state_that_is_loaded_a_second_time_by_hand_is_an_error(tmp_path: Path, what: str) -> None:
    def start() -> tuple[samerun.Run, dict[str, Any]]:
        model, optimizer = plain()
        parts: dict[str, Any] = {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
        parts["data"] = samerun.Data(list(SAMPLES), global_batch=4, micro_batch=2, seed=1)
        run = samerun.Run(tmp_path, model=model, optimizer=optimizer, scheduler=parts["schedule"], data=parts["data"])
        return run, parts

    def go(until: int, load: Any = None) -> dict[str, Any]:
        run, parts = start()
        with run:
            if load is not None:
                parts[what].load_state_dict(load)
            for window in run.windows(until=until):
                for batch in window:
                    window.backward((batch @ next(run._config.models["model"].parameters()).T).square().sum(), 2)
                window.step()
            return copy.deepcopy(parts[what].state_dict())

    early = go(1)
    go(3)
    with pytest.raises(UsageError, match=f"written to between the start of the run and its first window: {what}"):
        go(4, early)
    go(4)


# ---- names of what is trained


def adapter(*, also: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A frozen base with two small matrices beside it; the optimizer is given all, as people do."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"base": nn.Linear(7, 7), "down": nn.Linear(7, 2), "up": nn.Linear(2, 7)})
    model.forward = lambda x: model["base"](x) + model["up"](model["down"](x))  # type: ignore[method-assign]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("base") or name == also)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_an_adapter_resumes_with_the_same_trained_names_and_another_set_is_refused(tmp_path: Path) -> None:
    twin = train(tmp_path / "twin", *adapter())
    train(tmp_path / "run", *adapter(), until=3)
    with pytest.raises(Refused, match=r"would train other parameters: base\.bias was frozen and is not"):
        train(tmp_path / "run", *adapter(also="base.bias"))
    assert train(tmp_path / "run", *adapter()) == twin[3:]


def test_layers_that_the_loop_thawed_stay_thawed_after_a_resume(tmp_path: Path) -> None:
    def act(model: nn.Module, update: int) -> None:
        if update == 2:
            model["base"].bias.requires_grad_()  # type: ignore[index]

    twin = train(tmp_path / "twin", *adapter(), act=act)
    seen = resumed(tmp_path / "run", adapter, (3, 6), act=act)
    assert seen == twin
    assert twin != train(tmp_path / "never", *adapter())


def test_compiled_not_compiled_and_compiled_again_is_one_run(tmp_path: Path) -> None:
    def start(compiled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 7))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return torch.compile(model, backend="eager") if compiled else model, optimizer

    twin = train(tmp_path / "twin", *start(False))
    seen = []
    for until, compiled in ((2, True), (4, False), (6, True)):
        seen += train(tmp_path / "run", *start(compiled), until=until)
    assert seen == twin


# ---- who the run is


PAPERS = {"base": "sha256:b0", "tokenizer": "sha256:70", "chat_template": "sha256:7e"}


@pytest.mark.parametrize("paper", PAPERS)
def test_another_tokenizer_template_or_base_is_refused_with_both_values(tmp_path: Path, paper: str) -> None:
    train(tmp_path, *low(), until=1, identity=PAPERS)
    other: Mapping[str, str] = {**PAPERS, paper: "sha256:other"}
    with pytest.raises(Refused, match=f'user.{paper}: saved "{PAPERS[paper]}", now "sha256:other"'):
        train(tmp_path, *low(), identity=other)
    assert len(train(tmp_path, *low(), identity=PAPERS)) == 5


def test_a_vocabulary_that_was_resized_is_refused_with_both_shapes(tmp_path: Path) -> None:
    def start(num_words: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, num_words, bias=False))
        model.forward = lambda x: model[0](x) + model[1](x).sum(-1, keepdim=True)  # type: ignore[method-assign]
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    train(tmp_path, *start(11), until=1)
    with pytest.raises(Refused, match=r'model\.1\.weight: saved "float32\[11, 7\]", now "float32\[13, 7\]"'):
        train(tmp_path, *start(13))
    assert int(Store(tmp_path).catalog().entries[0].progress.updates) == 1


# ---- parts


PARTS = ("moments", "steps", "scheduler")


@pytest.mark.parametrize("waived", [c for n in range(4) for c in itertools.combinations(PARTS, n)], ids="-".join)
def test_whatever_is_waived_the_rate_is_the_twins_or_that_of_a_fresh_start(
    tmp_path: Path, waived: tuple[str, ...]
) -> None:
    """Never a third one, made of a scheduler that came back and an optimizer that did not."""

    def start() -> dict[str, Any]:
        model = nn.Linear(7, 7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2, 4], gamma=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": schedule}

    fresh = [0.1, 0.01, 0.001, 0.001, 0.0001]
    train(tmp_path, **start(), until=3)
    rates = [rate for rate, _ in train(tmp_path, **start(), until=5, waive=waived)]
    assert rates == pytest.approx(fresh[:2] if "scheduler" in waived else fresh[3:])
