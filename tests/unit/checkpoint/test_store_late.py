"""Late copies: made while training computes, behind a fence, and refused when a write got in between."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samerun.checkpoint import Store
from samerun.checkpoint.save.pending import Pending
from samerun.checkpoint.save.seal import device_seal
from samerun.checkpoint.save.staging import Staging
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import StorageError, TornCopyError
from samerun.ranks.group import Solo
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.state.fingerprint import fingerprint


def progress(update: int) -> Progress:
    return Progress(windows=Windows(update), updates=Updates(update))


class Held:
    """Keeps late copies waiting until `let_go`, so that a test can act in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        copy = Staging.late

        def late(staging: Staging) -> None:
            assert self.let_go.wait(20), "the test never let the copy go"
            copy(staging)

        monkeypatch.setattr(Staging, "late", late)


def by_copy(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)


def by_data(p: nn.Parameter) -> None:
    p.data.add_(1)


def by_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[-1] += 1


def by_fused_step(p: nn.Parameter) -> None:
    p.grad = torch.ones_like(p)
    torch.optim.AdamW([p], fused=True).step()


def swap_two(p: nn.Parameter) -> None:
    array = p.detach().numpy()
    array[0], array[1] = float(array[1]), float(array[0])


@pytest.mark.parametrize("write", [by_copy, by_data, by_numpy, by_fused_step, swap_two])
def test_a_write_before_the_copy_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[nn.Parameter], None]
) -> None:
    held, store = Held(monkeypatch), Store(tmp_path, background_group=Solo())
    parameter = nn.Parameter(torch.arange(1.0, 8.0))
    state = {"weights": Captured(tensors={"a": torch.ones(3), "p": parameter.detach()})}
    pending = store.save(state, progress(1), facts={}, late=["weights"])
    write(parameter)
    held.let_go.set()
    with pytest.raises(TornCopyError, match=r"weights/p was changed between the edge and window\.step\(\)"):
        pending.result()
    assert (pending.is_staged, pending.is_durable, pending.is_done) == (False, False, True)
    with pytest.raises(TornCopyError):
        pending.staged.wait()
    store.fence()  # nothing reads live memory any more, so nobody waits
    assert store.catalog().entries == ()
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_what_is_not_late_may_change_at_once_and_the_rest_behind_the_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, store = Held(monkeypatch), Store(tmp_path, background_group=Solo())
    late = {"w": torch.arange(7.0), "turned": torch.arange(6.0).reshape(2, 3).T, "bf": torch.ones(3).bfloat16()}
    late |= {"scalar": torch.tensor(3), "empty": torch.zeros(0, 2)}
    now, own = torch.arange(5.0), torch.arange(4)
    state = {
        "weights": Captured(tensors=late, plain={"lr": 0.5}),
        "ema": Captured(tensors={"w": now}, rank_tensors={"own": own}),
    }
    expected = {name: fingerprint(captured) for name, captured in state.items()}
    wanted = {key: tensor.clone() for key, tensor in late.items()}
    pending = store.save(state, progress(1), facts={}, late=["weights"])
    now.zero_()
    own.zero_()
    fence = threading.Thread(target=store.fence)
    fence.start()
    assert (pending.is_staged, fence.is_alive()) == (False, True)
    held.let_go.set()
    fence.join(20)
    assert pending.is_staged
    for tensor in late.values():
        tensor.zero_()
    with store.open(pending.result()) as checkpoint:
        assert checkpoint.digests == expected
        for key, tensor in wanted.items():
            target = torch.empty_like(tensor)
            checkpoint.source("weights").read_into(key, target)
            assert torch.equal(target, tensor), key
        target = torch.zeros(5)
        checkpoint.source("ema").read_into("w", target)
        assert target.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert pending.clocks.staged_seconds is not None and pending.clocks.durable_seconds is not None


def test_replicas_read_what_others_write_before_the_fence_opens(tmp_path: Path) -> None:
    """The index of a rank has the digests of all it held, also of the half that another rank wrote."""

    def body(group: ThreadGroup) -> None:
        store = Store(tmp_path, group=group, background_group=group)  # used in turns: nothing runs beside the save
        weights = {f"w{n}": torch.full((11,), float(n)) for n in range(4)}
        state = {"weights": Captured(tensors=weights)}
        expected = {"weights": fingerprint(state["weights"])}
        pending = store.save(state, progress(1), facts={}, late=["weights"])
        store.fence()
        for tensor in weights.values():
            tensor.zero_()
        with store.open(pending.result()) as checkpoint:
            assert checkpoint.digests == expected

    run_ranks(2, body)


def test_a_torn_copy_on_one_rank_fails_the_save_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    both = threading.Barrier(2)

    def body(group: ThreadGroup) -> str:
        store = Store(tmp_path, group=group, background_group=group)
        weights = {f"w{n}": torch.full((11,), float(n)) for n in range(4)}
        pending = store.save({"weights": Captured(tensors=weights)}, progress(1), facts={}, late=["weights"])
        if group.rank == 1:
            for tensor in weights.values():
                tensor.data.add_(1)
        both.wait()
        held.let_go.set()
        with pytest.raises(TornCopyError) as caught:
            pending.result()
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == f"rank 1: {second}"
    assert Store(tmp_path).catalog().entries == ()


def test_above_the_byte_budget_the_save_is_made_in_the_foreground_from_live_memory(tmp_path: Path) -> None:
    def body(group: ThreadGroup) -> None:
        store = Store(tmp_path, group=group, background_group=group, max_staging_bytes=4096)
        own = {"own": torch.full((2000 if group.rank else 2,), group.rank)}  # too large on rank 1 only
        pending = store.save({"rng": Captured(rank_tensors=own)}, progress(1), facts={}, late=["weights"])
        assert pending.is_durable and not pending.in_background
        assert store.staging_bytes == 16000
        assert store._buffer is None
        assert store.save({"rng": Captured(plain=1)}, progress(2), facts={}).in_background
        store.close()

    run_ranks(2, body)
    assert len(Store(tmp_path).catalog().entries) == 2


def test_no_memory_for_the_copies_is_an_error_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, background_group=Solo())
    state: dict[str, Any] = {"weights": Captured(tensors={"a": torch.ones(3)})}

    empty = torch.empty

    def refuse(size: int, **options: Any) -> torch.Tensor:
        if size:
            raise RuntimeError(f"not enough memory: you tried to allocate {size} bytes")
        return empty(size, **options)

    with monkeypatch.context() as patched:
        patched.setattr("samerun.checkpoint.save.staging.torch.empty", refuse)
        with pytest.raises(StorageError, match="max_staging_bytes bounds it") as caught:
            store.save(state, progress(1), facts={})
    assert caught.value.errno == errno.ENOMEM
    assert store.save(state, progress(2), facts={}).result().progress == progress(2)


def test_the_moments_of_a_save_can_be_awaited() -> None:
    pending = Pending("u1")

    async def both() -> list[bool]:
        asyncio.get_running_loop().call_later(0.01, pending.staged.come)
        await pending.staged
        reached = [pending.is_staged, pending.is_durable]
        asyncio.get_running_loop().call_later(0.01, pending.finish, OSError("as the test wants"))
        with pytest.raises(OSError, match="as the test wants"):
            await pending.durable
        return reached

    assert asyncio.run(both()) == [True, False]
    with pytest.raises(StorageError) as caught:
        Pending("u2").durable.wait(0.001)
    assert caught.value.errno == errno.ETIMEDOUT


def test_the_seal_of_a_device_knows_every_single_element() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex128):
        tensor = torch.arange(1, 14).to(dtype)
        sealed = device_seal(tensor)
        assert sealed == device_seal(tensor.clone())
        for position in range(13):
            other = tensor.clone()
            other[position] = 0
            assert device_seal(other) != sealed, (dtype, position)
        assert device_seal(tensor.flip(0)) != sealed
    assert device_seal(torch.empty(0)) == device_seal(torch.empty(0))
