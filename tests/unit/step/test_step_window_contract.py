"""The window's contract: what breaks it is a typed error, leaves no gradients, and leaves autocast closed."""

from __future__ import annotations

from collections.abc import Callable

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
    ("not reduced", lambda window, loss: window.backward(loss.expand(3), 3), r"got \(3,\)"),
    ("a number", lambda window, loss: window.backward(float(loss.detach()), 3), "got float"),  # type: ignore[arg-type]
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
