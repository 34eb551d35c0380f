"""What a user may get wrong, through the public names: a ValueError that names the value and what to write instead.

Each row is a training as somebody would write it. It must end before its first window where that can be known, with a
UsageError (never an assert, never a traceback of torch's), and leave no checkpoint behind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import samerun
from rank_pool import RankPool
from samerun.data import PackedDocuments, Stream, WindowSampler
from samerun.errors import Refused, UsageError
from samerun.step import Step
from samerun.step.schedule import Constant, WarmupCosine

ROWS = [torch.full((3,), float(i)) for i in range(20)]


class Split(nn.Module):
    """Two layers, the second one wherever it is told."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 1, device=second)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


def net() -> nn.Linear:
    return nn.Linear(3, 1)


def sgd(*models: nn.Module, **options: Any) -> SGD:
    return SGD([p for model in models for p in model.parameters()], **{"lr": 0.1, **options})


def data(dataset: Any = ROWS, **options: Any) -> Any:
    return samerun.Data(dataset, **{"global_batch": 4, "micro_batch": 2, **options})


def backward(model: Any) -> Callable[[Any, Any], None]:
    return lambda window, batch: window.backward(model(batch).sum(), len(batch))


class Way:
    """A training by Run or by Step; `began` counts the batches that its loop saw."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path, self.began = kind, path, 0

    def __call__(
        self,
        model: Any = None,
        optimizer: Any = None,
        body: Callable[[Any, Any], None] | None = None,
        *,
        source: Any = None,
        until: Any = 2,
        **options: Any,
    ) -> None:
        model = net() if model is None else model
        optimizer = sgd(model) if optimizer is None else optimizer
        for window in self._windows(model, optimizer, source, until, options):
            for batch in window:
                self.began += 1
                (body or backward(model))(window, batch)
            window.step()

    def _windows(self, model: Any, optimizer: Any, source: Any, until: Any, options: dict[str, Any]) -> Iterator[Any]:
        if self.kind == "Run":
            options = {"save_every": "1000 updates", "health": "off", **options}
            run = samerun.Run(
                options.pop("path", self.path),
                model=model,
                optimizer=optimizer,
                data=data() if source is None else source,
                **options,
            )
            with run:
                yield from run.windows(until=until)
            return
        step = Step(model, optimizer, **options)
        while step.progress.updates < until:
            yield step.window([torch.ones(2, 3)] * 2)


Case = Callable[[Way], object]


def frozen(way: Way) -> object:
    model = net().requires_grad_(False)
    return way(model)


def at_rate(rate: float) -> Case:
    def train(way: Way) -> object:
        model = net()
        optimizer = sgd(model)
        optimizer.param_groups[0]["lr"] = rate
        return way(model, optimizer)

    return train


def swapped(way: Way) -> object:
    """A torch scheduler for each of two optimizers, under the other one's name."""
    models = {"a": net(), "b": net()}
    optimizers = {name: sgd(model) for name, model in models.items()}
    return way(models, optimizers, scheduler={"a": StepLR(optimizers["b"], 1), "b": StepLR(optimizers["a"], 1)})


class Curve:
    def __init__(self, factor: Any) -> None:
        self._factor = factor

    def factor(self, position: float) -> Any:
        return self._factor if position > 1 else 1.0


def weighed(weight: Any) -> Case:
    def train(way: Way) -> object:
        model = net()
        return way(model, body=lambda window, batch: window.backward(model(batch).sum(), weight))

    return train


def lost(loss: Any) -> Case:
    return lambda way: way(body=lambda window, batch: window.backward(loss, 2))


BOTH: dict[str, tuple[str, Case]] = {
    "a layer on meta": (r"second\.weight is on the device 'meta'.*to_empty", lambda way: way(Split("meta"))),
    "a frozen layer on meta": (
        r"second\.weight is on the device 'meta'",
        lambda way: (lambda m: way(m, sgd(m.first)))(Split("meta")),
    ),
    "optimizer on meta": (
        r"parameter of shape \(1, 3\) that no model given here owns.*after wrapping",
        lambda way: way(net(), sgd(nn.Linear(3, 1, device="meta"))),
    ),
    "optimizer of another model": (r"no model given here owns", lambda way: way(net(), sgd(net()))),
    "nothing to train": (r"none of its 2 parameters is trained.*unfreeze", frozen),
    "one optimizer twice": (
        r"'a' and 'b' share the parameter weight.*Give each parameter to one optimizer",
        lambda way: (lambda m, o: way(m, {"a": o, "b": o}))(*(lambda m: (m, sgd(m)))(net())),
    ),
    "a parameter in two optimizers": (
        r"'a' and 'b' share the parameter weight of shape \(1, 3\)",
        lambda way: (lambda m: way(m, {"a": sgd(m), "b": sgd(m)}))(net()),
    ),
    "no optimizer": (r"optimizer=\{\} is empty", lambda way: way(net(), {})),
    "no model": (r"model=\{\} is empty", lambda way: way({}, sgd(net()))),
    "a number for a model": (r"model= got a int", lambda way: way(3, sgd(net()))),
    "parameters for an optimizer": (r"optimizer= got a list.*dict", lambda way: way(net(), list(net().parameters()))),
    "a number for a name": (r"model=\{1: …\}.*'1'", lambda way: (lambda m: way({1: m}, sgd(m)))(net())),
    "LBFGS": (
        r"LBFGS\.step\(\) needs closure",
        lambda way: (lambda m: way(m, torch.optim.LBFGS(m.parameters())))(net()),
    ),
    "lr nan": (r"group 0 has lr=nan", at_rate(math.nan)),
    "lr negative": (r"group 0 has lr=-1\.0", at_rate(-1.0)),
    "lr infinite": (r"group 0 has lr=inf", at_rate(math.inf)),
    "max_norm nan": (r"max_norm=nan.*None switches clipping off", lambda way: way(max_norm=math.nan)),
    "max_norm negative": (r"max_norm=-1 must be a positive", lambda way: way(max_norm=-1)),
    "max_norm zero": (r"max_norm=0\.0 must be a positive", lambda way: way(max_norm=0.0)),
    "max_norm infinite": (r"max_norm=inf.*None switches", lambda way: way(max_norm=math.inf)),
    "max_norm text": (r"max_norm='1\.0' must be", lambda way: way(max_norm="1.0")),
    "max_norm bool": (r"max_norm=True must be", lambda way: way(max_norm=True)),
    "max_norm tensor": (r"max_norm=tensor\(1\.\) must be", lambda way: way(max_norm=torch.tensor(1.0))),
    "noise_every zero": (r"noise_every=0 must be at least 1; None switches", lambda way: way(noise_every=0)),
    "noise_every a fraction": (r"noise_every=1\.5 is not a whole number", lambda way: way(noise_every=1.5)),
    "noise_every bool": (r"noise_every=True is not a whole", lambda way: way(noise_every=True)),
    "precision": (r"precision='fp8' is unknown; choose one of 'fp32'", lambda way: way(precision="fp8")),
    "objective": (r"objective=None is unknown", lambda way: way(objective=None)),
    "clock": (r"clock='epochs' is unknown.*'tokens'", lambda way: way(clock="epochs")),
    "fp16 parameters": (
        r"precision='fp16' keeps parameters in fp32",
        lambda way: way(net().half(), precision="fp16"),
    ),
    "a text for a scheduler": (r"scheduler='cosine' is neither a curve", lambda way: way(scheduler="cosine")),
    "a curve's class": (r"WarmupCosine is a class; write WarmupCosine\(…\)", lambda way: way(scheduler=WarmupCosine)),
    "another optimizer's scheduler": (
        r"StepLR was made for another optimizer than those of this run",
        lambda way: way(scheduler=StepLR(sgd(net()), 1)),
    ),
    "schedulers swapped": (r"made for the optimizer 'b', not for 'a'", swapped),
    "a curve without an optimizer": (
        r"scheduler 'c' has no optimizer of that name; there are \['a', 'b'\]",
        lambda way: (lambda m, n: way({"a": m, "b": n}, {"a": sgd(m), "b": sgd(n)}, scheduler={"c": Constant()}))(
            net(), net()
        ),
    ),
    "a data clock for a torch scheduler": (
        r"clock='tokens' needs a curve.*StepLR counts its own steps",
        lambda way: (lambda m, o: way(m, o, clock="tokens", scheduler=StepLR(o, 1)))(*(lambda m: (m, sgd(m)))(net())),
    ),
    "a curve that is no number from the start": (
        r"Broken\.factor\(1\) is nan; .* must be a finite number",
        lambda way: way(scheduler=type("Broken", (), {"factor": lambda self, position: math.nan})()),
    ),
}
"""What was written → what the message must contain; said before the first batch."""

INSIDE: dict[str, tuple[str, Case]] = {
    "a curve that turns nan": (r"Curve\.factor\(2\) is nan", lambda way: way(scheduler=Curve(math.nan))),
    "a curve that turns negative": (r"Curve\.factor\(2\) is -0\.5", lambda way: way(scheduler=Curve(-0.5))),
    "a curve that turns text": (r"Curve\.factor\(2\) is 'x'", lambda way: way(scheduler=Curve("x"))),
    "weight nan": (r"weight=nan must be a finite number of tokens", weighed(math.nan)),
    "weight negative": (r"weight=-1 must be", weighed(-1)),
    "weight text": (r"weight='2' must be", weighed("2")),
    "weight of each token": (
        r"torch\.float32 tensor of shape \(3,\).*weight\.sum\(\)",
        weighed(torch.ones(3)),
    ),
    "weight on meta": (r"weight is .* on the device 'meta'", weighed(torch.tensor(2.0, device="meta"))),
    "weight always zero": (r"100 windows in a row had weight 0 on every rank.*label masked", weighed(0)),
    "weight of zero tensors": (r"100 windows in a row had weight 0", weighed(torch.tensor(0))),
    "loss of each token": (r"got a torch\.float32 tensor of shape \(2,\); sum it over tokens", lost(torch.ones(2))),
    "loss on meta": (
        r"shape \(\) on the device 'meta'",
        lost(torch.ones((), device="meta", requires_grad=True) * 1),
    ),
    "loss a number": (r"must be one number in a tensor, got float", lost(3.0)),
    "loss detached": (r"depends on no trained parameter", lost(torch.ones(()))),
    "loss complex": (
        r"the loss is complex",
        lambda way: (lambda m: way(m, body=lambda w, b: w.backward(m(b).sum() * 1j, 2)))(net()),
    ),
}
"""The same, known only once it happens."""

EACH = [(kind, name) for kind in ("Run", "Step") for name in (*BOTH, *INSIDE)]


def checkpoints(path: Path) -> list[Path]:
    return list(path.glob("checkpoints/*/manifest.json"))


@pytest.mark.parametrize(("kind", "name"), EACH, ids=[f"{kind} {name}" for kind, name in EACH])
def test_a_training_that_cannot_work(tmp_path: Path, kind: str, name: str) -> None:
    message, train = (BOTH | INSIDE)[name]
    way = Way(kind, tmp_path)
    with pytest.raises(UsageError, match=f"(?s){message}") as caught:
        train(way)
    assert isinstance(caught.value, ValueError)
    if name in BOTH:
        assert way.began == 0 and checkpoints(tmp_path) == []


def run(**options: Any) -> Case:
    return lambda way: way(**options)


def sourced(make: Callable[[], Any], **options: Any) -> Case:
    return lambda way: way(source=make(), **options)


def parts(count: int = 9) -> list[torch.Tensor]:
    return [torch.stack(ROWS[i : i + 2]) for i in range(0, 2 * count, 2)]


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


RUNS: dict[str, tuple[str, Case]] = {
    # how long, how often, how many
    "until zero": (r"amount '0' must be a positive whole number", run(until=0)),
    "until negative": (r"amount '-3 epochs' must be a positive", run(until="-3 epochs")),
    "until a fraction": (r"amount 1\.5 is neither a whole number nor a text", run(until=1.5)),
    "until none": (r"amount None is neither", run(until=None)),
    "until bool": (r"amount True is neither", run(until=True)),
    "until infinite": (r"amount inf is neither", run(until=math.inf)),
    "until a time": (r"until='10 min'.*until=2000", run(until="10 min")),
    "until nonsense": (r"'soon' is not a number with a unit", run(until="soon")),
    "until epochs of a stream": (r"no epochs of known length", sourced(lambda: Stream(parts()), until="2 epochs")),
    "save_every zero": (r"save_every='0 min' would save at every edge", run(save_every="0 min")),
    "save_every negative": (r"'-1 min' is negative", run(save_every="-1 min")),
    "save_every a bare number": (r"amount '600' has no unit.*'600 updates'", run(save_every=600)),
    "save_every a fraction": (r"amount 1\.5 is neither", run(save_every=1.5)),
    "save_every epochs": (r"save_every='3 epochs'.*'10 min'", run(save_every="3 epochs")),
    "keep_last zero": (r"keep_last=0 must be at least 1", run(keep_last=0)),
    "keep_last a fraction": (r"keep_last=1\.5 is not a whole number", run(keep_last=1.5)),
    "keep_last none": (r"keep_last=None is not a whole", run(keep_last=None)),
    "max_staging_bytes": (r"max_staging_bytes='3' is not a whole number; None", run(max_staging_bytes="3")),
    "background": (r"background='no': write True or False", run(background="no")),
    # what else is handed over
    "path empty": (r"the run's path is empty", run(path="")),
    "path a number": (r"the run's path is 3", run(path=3)),
    "extra without a state": (r"extra=\{'ema': …\}: a int has no state_dict", run(extra={"ema": 3})),
    "extra a list": (r"extra= got a list", run(extra=[3])),
    "extra named as a component": (r"one of Run's own components", run(extra={"rng": net()})),
    "identity an object": (r"identity= must be plain JSON", run(identity={"a": object()})),
    "identity a list": (r"identity= got a list", run(identity=[1])),
    "waive one text": (r"waive=\['nothing'\]: no such component", run(waive="nothing")),
    "mesh": (r"mesh= got 3; give a DeviceMesh", run(mesh=3)),
    "preemption": (r"preemption= got '30 s'; give a Preemption", run(preemption="30 s")),
    "remap": (r"remap='epochs' is unknown", run(remap="epochs")),
    "no data": (r"data= got NoneType.*samerun\.Data", lambda way: samerun.Run(way.path, **untrained(), data=None)),
    "a bare list": (r"data= got list.*samerun\.Data", sourced(lambda: ROWS)),
    "a bare DataLoader": (r"WindowSampler", sourced(lambda: DataLoader(ROWS))),  # type: ignore[arg-type]
    "a loader that was read": (r"already iterated", sourced(lambda: begun_loader())),
    "another run's data": (r"rank 0 was given as data= has 1 windows behind it", sourced(lambda: begun(data()))),
    "another run's stream": (r"has 1 windows behind it", sourced(lambda: begun(Stream(parts())))),
    "data to another device": (r"device='meta', the model is on \['cpu'\]", sourced(lambda: data(device="meta"))),
    "data to no device": (r"device='gpu' of the data is no device", sourced(lambda: data(device="gpu"))),
    "stream to another device": (r"device='meta', the model is", sourced(lambda: Stream(parts(), device="meta"))),
    # the order
    "global_batch zero": (r"global_batch=0 must be at least 1", sourced(lambda: data(global_batch=0))),
    "global_batch a float": (r"global_batch=4\.0 is not a whole number", sourced(lambda: data(global_batch=4.0))),
    "global_batch NumPy's float": (r"global_batch=.*4\.0\)? is not", sourced(lambda: data(global_batch=np.float32(4)))),
    "global_batch bool": (r"global_batch=True is not a whole", sourced(lambda: data(global_batch=True))),
    "global_batch none": (r"global_batch=None is not a whole", sourced(lambda: data(global_batch=None))),
    "micro_batch negative": (r"micro_batch=-2 must be at least 1", sourced(lambda: data(micro_batch=-2))),
    "micro above global": (r"micro_batch=5 is larger than global_batch=4", sourced(lambda: data(micro_batch=5))),
    "seed too large": (r"seed=9223372036854775808 does not fit 64 bits", sourced(lambda: data(seed=2**63))),
    "seed NumPy's too large": (r"does not fit 64 bits", sourced(lambda: data(seed=np.uint64(2**63 + 5)))),
    "seed a fraction": (r"seed=1\.5 is not a whole number", sourced(lambda: data(seed=1.5))),
    "seed none": (r"seed=None is not a whole number", sourced(lambda: data(seed=None))),
    "empty dataset": (r"the dataset has 0 samples", sourced(lambda: data([]))),
    "fewer than a batch": (
        r"drop_tail.*global_batch=4 and only 3 samples.*straddle",
        sourced(lambda: data(ROWS[:3], epoch_end="drop_tail")),
    ),
    "no length": (r"Endless has no length.*Stream", sourced(lambda: data(Endless()))),
    "an iterator": (r"no random access.*Stream", sourced(lambda: data(iter(ROWS)))),
    "ranges overlap": (
        r"\(0, 5\) and \(4, 6\) overlap; write one range \(0, 6\)",
        sourced(lambda: data(skip=[(0, 5), (4, 6)])),
    ),
    "a range of nothing": (r"\(5, 5\) is empty", sourced(lambda: data(skip=[(5, 5)]))),
    "a range of fractions": (r"not a pair of whole numbers", sourced(lambda: data(skip=[(0.0, 2.0)]))),
    "no ranges": (r"skip=5 is no list of ranges", sourced(lambda: data(skip=5))),
    "epoch_end": (r"epoch_end='stop' is unknown", sourced(lambda: data(epoch_end="stop"))),
    "on_change": (r"on_change='replay'; this source offers", sourced(lambda: data(on_change="replay"))),
    "num_workers a fraction": (r"num_workers=1\.5 is not a whole", sourced(lambda: data(num_workers=1.5))),
    "num_workers text": (r"num_workers='2' is not a whole", sourced(lambda: data(num_workers="2"))),
    "shuffle": (r"Data does not take shuffle", sourced(lambda: data(shuffle=True))),
    "collate_fn": (r"collate_fn=3 cannot be called", sourced(lambda: data(collate_fn=3))),
    "fingerprint": (r"fingerprint=3 must be a text", sourced(lambda: data(fingerprint=3))),
    "documents too short": (
        r"4 tokens do not fill one sequence of 8",
        sourced(lambda: data(PackedDocuments([[1, 2], [3, 4]], [2, 2], sequence_length=8))),
    ),
    # streams
    "no iterable": (r"int cannot be iterated", sourced(lambda: Stream(3))),
    "microbatches zero": (
        r"microbatches_per_window=0 must be at least 1",
        sourced(lambda: Stream(parts(), microbatches_per_window=0)),
    ),
    "microbatches a fraction": (
        r"microbatches_per_window=1\.5 is not",
        sourced(lambda: Stream(parts(), microbatches_per_window=1.5)),
    ),
    "snapshot_every": (r"snapshot_every=0 must be at least 1", sourced(lambda: Stream(parts(), snapshot_every=0))),
    "max_replay": (r"max_replay=-1 must be at least 0; None", sourced(lambda: Stream(parts(), max_replay=-1))),
    "stream seed": (r"seed=-1 must be at least 0", sourced(lambda: Stream(parts(), seed=-1))),
    "shared": (r"shared='no': write True, False", sourced(lambda: Stream(parts(), shared="no"))),
    "num_samples": (r"num_samples=3 cannot be called", sourced(lambda: Stream(parts(), num_samples=3))),
    "stream fingerprint": (r"fingerprint=3 must be a text", sourced(lambda: Stream(parts(), fingerprint=3))),
    "an empty stream": (r"epoch 0 of the stream has no items", sourced(lambda: Stream([]))),
}


def untrained() -> dict[str, Any]:
    model = net()
    return {"model": model, "optimizer": sgd(model)}


def begun(source: Any) -> Any:
    """A source with one decided window."""
    window = next(source.windows())
    list(window)
    source.commit(window)
    source.close()
    return source


def begun_loader() -> Any:
    loader = DataLoader(ROWS, batch_sampler=WindowSampler(ROWS, global_batch=4, micro_batch=2))  # type: ignore[arg-type]
    next(iter(loader))
    return loader


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_cannot_work(tmp_path: Path, name: str) -> None:
    message, train = RUNS[name]
    way = Way("Run", tmp_path)
    with pytest.raises(UsageError, match=f"(?s){message}"):
        train(way)
    assert way.began == 0


STEPS: dict[str, tuple[str, Any, Any]] = {
    "no batches": (r"at least one batch on every rank", [], None),
    "none": (r"window\(\) got a NoneType; give a list", None, None),
    "a number": (r"got a int", 3, None),
    "a generator": (r"got a generator.*list\(batches\)", (b for b in [torch.ones(2, 3)]), None),
    "one tensor": (r"got a Tensor.*torch\.split", torch.ones(2, 2, 3), None),
    "too few numbers": (r"num_samples has 1 entries for 2 batches", [1, 2], [2]),
    "one number": (r"num_samples has a int for 2 batches", [1, 2], 2),
    "a negative number": (r"num_samples=-1 must be at least 0", [1, 2], [2, -1]),
    "a fraction": (r"num_samples=1\.5 is not a whole", [1, 2], [2, 1.5]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_window_of_nonsense(name: str) -> None:
    message, batches, num_samples = STEPS[name]
    model = net()
    with pytest.raises(UsageError, match=f"(?s){message}"):
        Step(model, sgd(model)).window(batches, num_samples=num_samples)


def test_what_looks_odd_and_is_right_trains(tmp_path: Path) -> None:
    """The controls: NumPy's integers, a negative seed, one sample, a batch larger than the dataset, frozen parts."""
    right: list[Case] = [
        sourced(lambda: data(global_batch=np.int64(4), micro_batch=np.int32(2), seed=np.int64(3))),
        sourced(lambda: data(ROWS[:1], seed=-1)),
        sourced(lambda: data(ROWS[:3])),
        sourced(lambda: data(skip=np.array([[0, 4]]))),
        sourced(lambda: Stream(parts(), microbatches_per_window=np.int64(2))),
        run(until=np.int64(2), keep_last=np.int64(2), max_norm=np.float32(1.0), noise_every=np.int64(1)),
        run(path=str(tmp_path / "text"), waive="rng", max_norm=1),
        lambda way: (lambda m: way(m.requires_grad_(True), sgd(m.first)))(Split("cpu")),
    ]
    for number, train in enumerate(right):
        train(Way("Run", tmp_path / str(number)))


@pytest.mark.parametrize(
    ("saved", "changed", "message"),
    [
        ({}, {"dataset": ROWS[:19]}, r"data\.num_samples: saved 20, now 19"),
        ({"fingerprint": "a"}, {"fingerprint": "b"}, r'data\.fingerprint: saved "a", now "b"'),
        ({}, {"seed": 3}, r"data\.seed: saved 0, now 3"),
        ({}, {"global_batch": 6}, r"data\.global_batch: saved 4, now 6"),
    ],
    ids=["length", "fingerprint", "seed", "batch"],
)
def test_data_that_changed_is_another_run(
    tmp_path: Path, saved: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    """As a run: refused, and nothing is touched. Data alone: a ValueError when the state arrives."""
    Way("Run", tmp_path)(source=data(**saved))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refused, match=f"(?s)nothing was touched.*{message}"):
        Way("Run", tmp_path)(source=data(**{**saved, **changed}), until=4)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UsageError, match=r"was .* and is now"):
        data(**{**saved, **changed}).load_state_dict(begun(data(**saved)).state_dict())


@pytest.mark.parametrize("make", [data, lambda: Stream(parts())], ids=["Data", "Stream"])
def test_data_that_was_iterated_when_its_state_arrives(tmp_path: Path, make: Callable[[], Any]) -> None:
    Way("Run", tmp_path)(source=make())
    source = make()
    list(next(source.windows()))
    with pytest.raises(UsageError, match=r"already iterated when its state arrived.*before windows\(\)"):
        Way("Run", tmp_path)(source=source, until=4)


ON_RANKS: dict[str, tuple[int, str, str]] = {
    # case → (guilty rank or -1 for all, its error, what its message must contain)
    "max_norm": (1, "UsageError", r"max_norm=nan must be"),
    "optimizer": (0, "UsageError", r"no model given here owns"),
    "empty": (1, "UsageError", r"the dataset has 0 samples"),
    "unwrapped": (1, "Refused", r"2 ranks, but the model Linear is neither DDP.*DistributedDataParallel\(model\)"),
    "too small": (-1, "UsageError", r"global_batch=2 is less than micro_batch·replicas = 2·2 = 4"),
    "until": (1, "UsageError", r"'3 epochs of nonsense' is not a number"),
    "weight": (1, "UsageError", r"window 1: weight=-1 must be"),
    "detached": (0, "UsageError", r"window 1: the loss depends on no trained parameter"),
    "shorter": (1, "Refused", r"ranks \[1\].*data\.num_samples: rank 0 20, rank 1 19"),
    "batch": (1, "Refused", r"ranks \[1\].*data\.global_batch: rank 0 4, rank 1 6"),
    "behind": (1, "UsageError", r"rank 1 was given as data= has 1 windows behind it"),
    "empty windows": (-1, "UsageError", r"100 windows in a row had weight 0 on every rank"),
}
AGREED = ("too small", "shorter", "batch", "behind", "empty windows")
"""What all ranks say alike; in the others the peers of the guilty rank say that it left."""


@pytest.mark.parametrize("case", ON_RANKS)
def test_all_ranks_end_when_one_was_given_nonsense(ranks: RankPool, tmp_path: Path, case: str) -> None:
    guilty, error, message = ON_RANKS[case]
    answers = ranks.answers(
        2, "bad_input_jobs:train", timeout_seconds=60, path=str(tmp_path / "run"), case=case, guilty=guilty
    )
    assert all("error" in answer for answer in answers), answers
    told = answers if case in AGREED else [answers[guilty]]
    for answer in told:
        assert answer["error"] == error, answer["trace"]
        assert re.search(f"(?s){message}", answer["text"]), answer["text"]
    for answer in answers:
        assert answer["error"] != "AssertionError", answer["trace"]
