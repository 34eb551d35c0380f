"""Two models that train against each other: each optimizer its own loss, its own decision, no foreign gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rank_pool import RankPool
from samerun.errors import UsageError, WindowError
from samerun.step import Step
from step_jobs import Poisoned, flat, gan, gan_data, net


def reference(num_windows: int) -> dict[str, list[float]]:
    """The same training by hand, one process, every window's data as one batch."""
    torch.manual_seed(5)
    generator, critic = nn.Linear(3, 7).double(), net()
    g = torch.optim.SGD(generator.parameters(), lr=0.1)
    d = torch.optim.SGD(critic.parameters(), lr=0.2)
    for number in range(num_windows):
        real = torch.cat([pair[0] for pair in gan_data(number)])
        noise = torch.cat([pair[1] for pair in gan_data(number)])
        d.zero_grad()
        fake = generator(noise).detach()
        ((critic(real).square().sum() + (critic(fake) - 1).square().sum()) / len(real)).backward()
        d.step()
        g.zero_grad()
        (critic(generator(noise)).square().sum() / len(real)).backward()
        g.step()
    return {"g": flat(generator), "d": flat(critic)}


def close(one: list[float], other: list[float]) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-11)


def test_one_process_equals_training_by_hand() -> None:
    got, expected = gan("solo", 4), reference(4)
    assert close(got["g"], expected["g"]) and close(got["d"], expected["d"])
    assert got["progress"] == {"windows": 4, "skipped": 0, "updates": 4, "samples": 16, "tokens": 4 * 26}


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_equal_training_by_hand(ranks: RankPool, world_size: int) -> None:
    expected = reference(3)
    answers = ranks.run(world_size, "step_jobs:gan", wrap="ddp", num_windows=3)
    for got in answers:
        assert close(got["g"], expected["g"]) and close(got["d"], expected["d"])
        assert got["g"] == answers[0]["g"] and got["d"] == answers[0]["d"]


def made(precision: str = "fp32") -> tuple[nn.Module, nn.Module, Step]:
    torch.manual_seed(5)
    generator, critic = nn.Linear(3, 7), net(dtype=torch.float32, norm=True)
    optimizers = {
        "g": torch.optim.SGD(generator.parameters(), lr=0.1),
        "d": torch.optim.SGD(critic.parameters(), lr=0.1),
    }
    return generator, critic, Step({"g": generator, "d": critic}, optimizers, precision=precision)


NOISE = torch.arange(12.0).reshape(4, 3) / 10


def test_a_loss_after_the_last_batch_opens_no_autocast() -> None:
    """Inside the loop it is opened again for another optimizer's loss of the same batch; left open it is stale."""
    generator, critic, step = made("bf16")
    window = step.window([NOISE])
    for noise in window:
        window.backward(critic(generator(noise).detach()).float().sum(), 4, of="d")
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    for name in ("d", "g"):
        with step.autocast():
            loss = critic(generator(NOISE)).float().square().sum()
        window.backward(loss, 4, of=name)
        assert not torch.is_autocast_enabled("cpu"), name


def test_a_bad_loss_of_one_skips_only_that_one() -> None:
    generator, critic, step = made()
    before_d, before_buffers = flat(critic), [buffer.clone() for buffer in critic.buffers()]
    window = step.window([NOISE])
    for noise in window:
        window.backward(critic(generator(noise).detach()).sum() * math.nan, 4, of="d")
        window.backward(critic(generator(noise)).square().sum(), 4, of="g")
    before_g = flat(generator)
    assert window.step("d").reason.value == "non_finite_loss"
    assert window.step("g").updated
    assert flat(critic) == before_d and flat(generator) != before_g
    assert all(torch.equal(one, two) for one, two in zip(before_buffers, critic.buffers(), strict=True))
    assert step.progress.to_json() == {"windows": 1, "skipped": 0, "updates": 1, "samples": 1, "tokens": 8}


def test_a_window_in_which_all_skip_is_skipped() -> None:
    generator, critic, step = made()
    window = step.window([NOISE])
    for noise in window:
        window.backward(critic(generator(noise).detach()).sum() * math.nan, 4, of="d")
        window.backward(critic(generator(noise)).sum() * math.nan, 4, of="g")
    window.step("g")
    assert not window.is_decided
    window.step("d")
    assert window.is_decided
    assert step.progress.skipped == 1 and step.progress.updates == 0


def test_each_optimizer_has_its_own_loss_scale_and_both_are_saved() -> None:
    generator, critic, step = made("fp16")
    window = step.window([NOISE])
    for noise in window:
        window.backward(Poisoned.apply(critic(generator(noise).detach()).sum()), 4, of="d")
        window.backward(critic(generator(noise)).square().sum() * 1e-3, 4, of="g")
    assert window.step("d").reason.value == "non_finite_grad"
    assert window.step("g").updated
    scales = {name: state["scale"] for name, state in step.state_dict()["scaler"].items()}
    assert scales == {"g": 65536.0, "d": 32768.0}
    other = made("fp16")[2]
    other.load_state_dict(step.state_dict())
    assert other.state_dict() == step.state_dict()


def test_names_and_order_are_checked() -> None:
    generator, critic, step = made()
    window = step.window([NOISE])
    for noise in window:
        with pytest.raises(UsageError, match="name one of them"):
            window.backward(critic(noise.new_ones(4, 7)).sum(), 4)
        window.backward(critic(generator(noise).detach()).square().sum(), 4, of="d")
    with pytest.raises(UsageError, match="name one of them"):
        window.step()
    window.step("d")
    with pytest.raises(WindowError, match="second step"):
        window.step("d")
    with pytest.raises(WindowError, match="backward"):
        window.backward(critic(generator(NOISE)).sum(), 4, of="d")
    with pytest.raises(WindowError, match="never stepped"):
        step.window([NOISE])


def test_schedulers_by_name_step_with_their_own_optimizer() -> None:
    torch.manual_seed(5)
    generator, critic = nn.Linear(3, 7), net(dtype=torch.float32)
    optimizers = {
        "g": torch.optim.SGD(generator.parameters(), lr=1.0),
        "d": torch.optim.SGD(critic.parameters(), lr=1.0),
    }
    schedulers = {name: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for name, o in optimizers.items()}
    step = Step({"g": generator, "d": critic}, optimizers, scheduler=schedulers)
    for number in range(2):
        window = step.window([NOISE])
        for noise in window:
            bad = math.nan if number == 0 else 1.0
            window.backward(critic(generator(noise).detach()).square().sum() * bad, 4, of="d")
            window.backward(critic(generator(noise)).square().sum(), 4, of="g")
        window.step("d")
        window.step("g")
    assert (schedulers["g"].last_epoch, schedulers["d"].last_epoch) == (2, 1)


@pytest.mark.parametrize("order", [("d", "g"), ("g", "d")])
def test_a_loss_leaves_no_gradients_with_the_other_optimizer(order: tuple[str, str]) -> None:
    """Both losses in one batch: the generator's runs through the critic, whose update must not notice."""
    generator, critic, step = made()
    own_generator, own_critic, _ = made()
    own_critic(own_generator(NOISE).detach()).square().sum().div(4).backward()
    expected = [p.detach() - 0.1 * p.grad for p in own_critic.parameters() if p.grad is not None]
    window = step.window([NOISE])
    for noise in window:
        for name in order:
            fake = generator(noise).detach() if name == "d" else generator(noise)
            window.backward(critic(fake).square().sum(), 4, of=name)
    window.step("d")
    window.step("g")
    for one, other in zip(expected, critic.parameters(), strict=True):
        assert torch.allclose(one, other.detach(), rtol=0, atol=1e-6)  # float32
