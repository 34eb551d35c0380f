"""The window's contract: what breaks it is a typed error, leaves no gradients, and leaves autocast closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samerun.errors import UsageError, WindowError
from samerun.step import Step
from samerun.step.window import Window
from step_jobs import Net, batches, flat, loss_sum, net


def made(precision: str = "bf16") -> tuple[Net, Step]:
    model = net(dtype=torch.float32, norm=True)
    return model, Step(model, torch.optim.SGD(model.parameters(), lr=1.0), precision=precision)


def opened(precision: str = "bf16") -> tuple[Net, Window]:
    model, step = made(precision)
    return model, step.window(batches([3, 4, 2], torch.float32))


def backward(model: nn.Module, window: Window, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    window.backward(loss_sum(model, batch), len(batch[1]))


def assert_nothing_left(model: nn.Module) -> None:
    assert not torch.is_autocast_enabled("cpu")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_is_open_for_the_forward_and_closed_for_the_backward() -> None:
    model, window = opened()
    for batch in window:
        assert torch.is_autocast_enabled("cpu")
        loss = loss_sum(model, batch)
        window.backward(loss, len(batch[1]))
        assert not torch.is_autocast_enabled("cpu")
    assert window.step().updated


def test_a_break_drops_the_window() -> None:
    model, window = opened()
    before = [buffer.clone() for buffer in model.buffers()]
    for batch in window:
        backward(model, window, batch)
        break
    assert_nothing_left(model)
    assert all(torch.equal(one, two) for one, two in zip(before, model.buffers(), strict=True))
    with pytest.raises(WindowError, match="left early"):
        window.step()


def test_a_break_before_the_backward_closes_autocast() -> None:
    model, window = opened()
    for _ in window:
        break
    assert_nothing_left(model)


def test_an_exception_in_the_loop_closes_autocast_at_once() -> None:
    model, window = opened()
    with pytest.raises(ZeroDivisionError):
        for batch in window:
            loss_sum(model, batch)
            raise ZeroDivisionError
    assert_nothing_left(model)
    try:
        for _ in made()[1].window(batches([3], torch.float32)):
            raise ZeroDivisionError
    except ZeroDivisionError as error:  # the traceback is alive and holds the frame
        assert error.__traceback__ is not None
        assert not torch.is_autocast_enabled("cpu")


def test_a_step_inside_the_loop_is_too_early() -> None:
    model, window = opened()
    with pytest.raises(WindowError, match="finish iterating"):
        for batch in window:
            backward(model, window, batch)
            window.step()
    assert_nothing_left(model)


def test_a_step_before_the_first_batch_is_too_early() -> None:
    _, window = opened()
    with pytest.raises(WindowError, match="not started"):
        window.step()


def test_a_second_step_is_an_error() -> None:
    model, window = opened()
    for batch in window:
        backward(model, window, batch)
    window.step()
    after = flat(model)
    with pytest.raises(WindowError, match="one update"):
        window.step()
    assert flat(model) == after


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_batch_without_backward_is_an_error(missing: int) -> None:
    model, window = opened()
    with pytest.raises(WindowError, match=f"batch {missing} of 3: no backward"):
        for number, batch in enumerate(window):
            if number != missing:
                backward(model, window, batch)
    assert_nothing_left(model)


def test_a_second_backward_for_a_batch_is_an_error() -> None:
    model, window = opened()
    with pytest.raises(WindowError, match="second one for the same batch"):
        for batch in window:
            backward(model, window, batch)
            backward(model, window, batch)
    assert_nothing_left(model)


def test_a_second_iteration_is_an_error() -> None:
    model, window = opened()
    for batch in window:
        backward(model, window, batch)
    with pytest.raises(WindowError, match="iterated before"):
        list(window)


def test_a_window_that_was_not_stepped_blocks_the_next() -> None:
    model, step = made()
    window = step.window(batches([3], torch.float32))
    for batch in window:
        backward(model, window, batch)
    with pytest.raises(WindowError, match="never stepped"):
        step.window(batches([3], torch.float32))


CALLS: list[tuple[str, Callable[[Window, torch.Tensor], None], str]] = [
    ("no count", lambda window, loss: window.backward(loss), "without the count"),
    ("mean without its count", lambda window, loss: window.backward(mean=loss), "without the count"),
    ("sum and mean", lambda window, loss: window.backward(loss, 3, mean=loss), "summed loss"),
    ("not reduced", lambda window, loss: window.backward(loss.expand(3), 3), r"shape \(3,\); sum it"),
    ("a number", lambda window, loss: window.backward(float(loss.detach()), 3), "got float"),  # type: ignore[arg-type]
    ("complex", lambda window, loss: window.backward(loss * 1j, 3), "a loss is a real number"),
    ("weights of rows", lambda window, loss: window.backward(loss, torch.ones(3)), r"of shape \(3,\); it must be one"),
    ("a word", lambda window, loss: window.backward(loss, "3"), "weight='3' must be a finite number"),  # type: ignore[arg-type]
    ("detached", lambda window, loss: window.backward(loss.detach(), 3), "no trained parameter"),
    ("unknown optimizer", lambda window, loss: window.backward(loss, 3, of="critic"), "critic"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in CALLS], ids=[case[0] for case in CALLS])
def test_losses_that_say_too_little(call: Callable[[Window, torch.Tensor], None], message: str) -> None:
    model, window = opened()
    with pytest.raises(UsageError, match=message):
        for batch in window:
            call(window, loss_sum(model, batch))
    assert_nothing_left(model)


def test_gradients_from_before_the_window_do_not_count() -> None:
    results = []
    for stale in (False, True):
        model = net()
        step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        if stale:
            loss_sum(model, batches([5])[0]).backward()
        window = step.window(batches([3, 4]))
        for batch in window:
            backward(model, window, batch)
        window.step()
        results.append(flat(model))
    assert results[0] == results[1]


def test_record_counts_what_the_users_code_ran_backward_on() -> None:
    results = []
    for own in (False, True):
        model = net()
        step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        window = step.window(batches([3, 4]))
        for batch in window:
            loss = loss_sum(model, batch)
            if own:
                loss.backward()
                window.record(loss, len(batch[1]))
            else:
                window.backward(loss, len(batch[1]))
        results.append((flat(model), window.step().loss))
    assert results[0] == results[1]


def test_record_is_refused_where_the_loss_must_be_scaled() -> None:
    model, window = opened("fp16")
    with pytest.raises(UsageError, match="fp16"):
        for batch in window:
            loss = loss_sum(model, batch)
            loss.backward()
            window.record(loss, 3)


def test_half_parameters_are_refused_with_a_loss_scale() -> None:
    model = net(dtype=torch.float16)
    with pytest.raises(UsageError, match=r"model\.half"):
        Step(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp16")


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return function(*args, **(kwargs or {}))


class ToList(TorchFunctionMode):
    """`tolist` reads a CPU tensor without a dispatched operation; on a device it is one copy to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += function in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.cpu)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tensor_weight", [False, True])
def test_at_most_one_host_read_in_a_window(precision: str, tensor_weight: bool) -> None:
    model, step = made(precision)
    for number in range(3):
        with HostReads() as reads, ToList() as lists:
            window = step.window(batches([3, 4, 2], torch.float32))
            for batch in window:
                count = len(batch[1])
                window.backward(loss_sum(model, batch), torch.tensor(count) if tensor_weight else count)
            window.step()
        first = 1 if precision == "fp16" and number == 0 else 0  # once a run: the loss scale's start
        assert reads.count <= 1 + first
        assert lists.count == 1 + first


def test_the_counter_sees_a_host_read() -> None:
    with HostReads() as reads, ToList() as lists:
        torch.ones(()).item()
        torch.ones(3).tolist()
    assert reads.count >= 1
    assert lists.count == 2


def test_a_step_that_failed_is_not_repeated() -> None:
    """Gradients were scaled already; scaling them again would be a smaller update, in silence."""
    model, step = made("fp32")
    optimizer = step._engine.updaters["model"]._optimizer

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = optimizer.register_step_pre_hook(fails)
    window = step.window(batches([3], torch.float32))
    for batch in window:
        backward(model, window, batch)
    with pytest.raises(RuntimeError, match="out of memory"):
        window.step()
    handle.remove()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(WindowError, match="may have changed some parameters"):
        window.step()
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_parameters_that_join_the_optimizer_inside_a_window_are_an_error() -> None:
    """Their gradients would be sums where the others are means."""
    model, step = made("fp32")
    window = step.window(batches([3], torch.float32))
    for batch in window:
        backward(model, window, batch)
    optimizer = step._engine.updaters["model"]._optimizer
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
    with pytest.raises(WindowError, match="changed inside a window"):
        window.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_exchanged_for_others_between_windows_are_trained_alike(dtype: torch.dtype) -> None:
    """As many as before: only their identity tells."""
    first, second = (nn.Linear(2, 1, bias=False, dtype=dtype) for _ in range(2))
    optimizer = torch.optim.SGD(first.parameters(), lr=1.0)
    step = Step(nn.ModuleList([first, second]), optimizer)
    for model in (first, second):
        optimizer.param_groups[0]["params"] = list(model.parameters())
        before = model.weight.detach().clone()
        window = step.window([torch.full((4, 2), 0.5, dtype=dtype)] * 2)
        for batch in window:
            window.backward(model(batch).sum(), 4)
        assert window.step().grad_norm == pytest.approx(0.5**0.5)
        assert torch.equal(model.weight, (before.float() - 0.5).to(dtype))


def test_optimizers_that_a_window_cannot_step_are_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"LBFGS.step\(\) needs closure"):
        Step(model, torch.optim.LBFGS(model.parameters()))
    both = {name: torch.optim.SGD(model.parameters()) for name in ("a", "b")}
    with pytest.raises(UsageError, match="'a' and 'b' share the parameter"):
        Step({"a": model}, both)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_are_the_dense_ones(optimizer: Any) -> None:
    weights, norms = [], []
    for sparse in (True, False):
        torch.manual_seed(2)
        model = nn.Embedding(5, 3, sparse=sparse)
        how = optimizer if sparse or optimizer is torch.optim.SGD else torch.optim.Adam
        step = Step(model, how(model.parameters(), lr=0.5), max_norm=0.1)
        window = step.window([torch.tensor([1, 1, 2]), torch.tensor([2])])
        for batch in window:
            window.backward(model(batch).square().sum(), len(batch))
        outcome = window.step()
        norms.append((outcome.grad_norm, outcome.grad_norm_clipped))
        weights.append(model.weight.detach().clone())
    assert norms[0] == pytest.approx(norms[1]) and norms[0][0] > 0.1
    assert torch.allclose(*weights, rtol=0, atol=1e-5)  # SparseAdam adds its epsilon elsewhere
