from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samerun.errors import UsageError
from samerun.health.corruption.attribution import Blame, Evidence, classify, is_confirmed, replay
from samerun.health.corruption.canary import Probe, Verdict, key_of, probes, read_golden, run_canary, write_golden
from samerun.health.corruption.checksum import checksum, checksums, compare_replicas, disagreements
from samerun.health.corruption.qualify import (
    false_alarm_budget,
    qualify,
    runs_for_detection,
    share_seen,
)
from samerun.health.corruption.replaying import Call, Replayer, packed, unpacked
from samerun.ranks.threads import ThreadGroup, run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]


def plain_checksum(data: bytes) -> tuple[int, int]:
    """The definition, word by word, in Python integers."""
    width = next(width for width in (4, 2, 1) if len(data) % width == 0)
    words = [int.from_bytes(data[i : i + width], "little", signed=width > 1) for i in range(0, len(data), width)]
    return sum(words) % 2**64, sum((i + 1) * w for i, w in enumerate(words)) % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (13, 7), (1,)])
def test_a_checksum_is_its_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 50).to(dtype)
    assert checksum(tensor) == plain_checksum(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def test_pieces_and_strides_make_no_difference() -> None:
    big = torch.arange(3 * (1 << 20) + 7, dtype=torch.int32) * 7919
    words = big.to(torch.float64)
    assert checksum(big)[0] == int(words.sum().item()) % 2**64
    square = torch.randn(13, 13)
    assert checksum(square.T) == checksum(square.T.contiguous()) != checksum(square)


@given(st.integers(0, 90), st.integers(0, 31))
def test_every_flipped_bit_is_seen(position: int, bit: int) -> None:
    tensor = torch.randn(91, generator=torch.Generator().manual_seed(4))
    before = checksum(tensor)
    words = tensor.view(torch.int32)
    words[position] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert checksum(tensor) != before


def test_a_swap_is_seen_by_the_second_sum_alone() -> None:
    one, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
    assert checksum(one)[0] == checksum(other)[0]
    assert checksum(one) != checksum(other)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_replicas_that_agree_and_one_flipped_bit(world_size: int) -> None:
    def body(group: ThreadGroup) -> list[list[Any]]:
        generator = torch.Generator().manual_seed(5)
        state = {"a.weight": torch.randn(13, 7, generator=generator), "b.bias": torch.randn(7, generator=generator)}
        clean = compare_replicas(checksums(state), group)
        if group.rank == world_size - 1 and world_size > 1:
            state["b.bias"].view(torch.int32)[3] ^= 1
        return [clean, [(d.name, d.minority) for d in compare_replicas(checksums(state), group)]]

    for clean, found in run_ranks(world_size, body):
        assert clean == []
        guilty = {1: (), 2: (0, 1), 3: (2,), 4: (3,)}[world_size]  # of two, nobody can say which
        assert found == ([("b.bias", guilty)] if world_size > 1 else [])


def test_a_tensor_that_one_rank_lacks_is_a_disagreement() -> None:
    (found,) = disagreements([{"a": (1, 1)}, {"a": (1, 1)}, {}])
    assert found.minority == (2,)
    assert "rank 2" in str(found)


def test_qualified_bitwise_by_tolerance_or_not_at_all() -> None:
    exact = qualify([0.0] * 19, reduction=1024, accumulator="float32", output="float32")
    assert exact.tolerance == 0
    varies = qualify([0.0] * 18 + [1e-6], reduction=1024, accumulator="float32", output="float32")
    assert varies.tolerance == pytest.approx(4e-6)
    bound = 6 * math.sqrt(1024) * 2**-24 + 2 * 2**-24
    wild = qualify([bound / 3] * 19, reduction=1024, accumulator="float32", output="float32")
    assert not wild.is_qualified
    assert not qualify([math.nan] * 19, reduction=4, accumulator="float32", output="float32").is_qualified
    with pytest.raises(UsageError, match="20 repetitions"):
        qualify([0.0] * 18, reduction=4, accumulator="float32", output="float32")


def test_power_and_budget_are_the_published_figures() -> None:
    assert runs_for_detection(2.89e-2) == pytest.approx(102, abs=1)
    assert runs_for_detection(1e-3) == pytest.approx(3000, rel=0.01)
    assert false_alarm_budget(1024, 24) == pytest.approx(1.4e-6, rel=0.04)
    assert share_seen(runs_for_detection(1e-3)) <= 1e-3
    assert share_seen(0) == 1
    with pytest.raises(UsageError):
        runs_for_detection(0)


def test_this_machine_passes_and_its_golden_holds(tmp_path: Path) -> None:
    path = tmp_path / "canary.json"
    key = key_of("cpu", "float32")
    assert read_golden(path, key) is None
    torch.manual_seed(3)
    stream = torch.get_rng_state()
    first = run_canary("cpu")
    assert torch.equal(torch.get_rng_state(), stream)
    assert {result.verdict for result in first} == {Verdict.PASS}
    write_golden(path, key, first)
    known = read_golden(path, key)
    assert known is not None and set(known) == {probe.name for probe in probes()}
    again = run_canary("cpu", golden=known)
    assert all(result.had_golden and result.verdict is Verdict.PASS for result in again)
    assert read_golden(path, {**key, "device": "another"}) is None
    (tmp_path / "x").write_text("[]")
    with pytest.raises(UsageError, match="holds no canary goldens"):
        read_golden(tmp_path / "x", key)


def flipping(every: int) -> Probe:
    """A device that flips one bit in each `every`-th run."""
    calls = iter(range(1, 10_000))

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        if next(calls) % every == 0:
            y.view(torch.int32)[3, 5] ^= 1 << 12
        return y

    return Probe(name="gemm", run=run, reduction=192)


def test_control_a_device_that_flips_bits_never_passes() -> None:
    (sometimes,) = run_canary("cpu", among=[flipping(15)])
    assert sometimes.verdict is Verdict.CORRUPT  # 1 of 20: no kernel varies so seldom
    golden = {"gemm": run_canary("cpu", among=[flipping(10_000)])[0].digest}
    (always,) = run_canary("cpu", among=[flipping(1)], golden=golden)
    assert always.verdict is Verdict.CORRUPT  # equal every time, and wrong every time
    assert run_canary("cpu", among=[flipping(1)])[0].verdict is Verdict.PASS  # which only a golden can tell


def test_a_kernel_that_varies_wildly_is_not_qualified() -> None:
    draws = torch.Generator().manual_seed(1)
    noisy = Probe(name="noisy", run=lambda x: x + 0.01 * torch.randn(x.shape, generator=draws), reduction=192)
    (result,) = run_canary("cpu", among=[noisy])
    assert result.verdict is Verdict.NOT_QUALIFIED


def evidence(**changed: Any) -> Evidence:
    values: dict[str, Any] = {
        "suspect": 1, "original": "bad", "replayed": "bad", "peers": ("bad", "bad", "bad"),
        "kernels_are_deterministic": True, "other_microbatch_is_good": True,
    }  # fmt: skip
    return Evidence(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "blame"),
    [
        ({"replayed": "good"}, Blame.TRANSIENT_HARDWARE),
        ({"replayed": "good", "kernels_are_deterministic": False}, Blame.UNRESOLVED),
        ({"peers": ("good", "good", "good")}, Blame.PERSISTENT_HARDWARE),
        ({"peers": ("good", "good", "good"), "kernels_are_deterministic": False}, Blame.UNRESOLVED),
        ({"peers": ("good",)}, Blame.UNRESOLVED),  # one against one
        ({"peers": ("good", "good", "bad")}, Blame.UNRESOLVED),
        ({}, Blame.DATA),
        ({"peers": ()}, Blame.DATA),
        ({"peers": (), "other_microbatch_is_good": None}, Blame.UNRESOLVED),
        ({"other_microbatch_is_good": None}, Blame.UNRESOLVED),
        ({"other_microbatch_is_good": False}, Blame.STATE),
        ({"other_microbatch_is_good": False, "state_differs_from_peers": False}, Blame.MODEL),
        ({"state_differs_from_peers": True}, Blame.STATE),
    ],
)
def test_every_row_of_the_table(changed: dict[str, Any], blame: Blame) -> None:
    assert classify(evidence(**changed)) is blame


def test_hardware_is_confirmed_by_two_incidents() -> None:
    assert not is_confirmed([Blame.PERSISTENT_HARDWARE, Blame.DATA])
    assert is_confirmed([Blame.PERSISTENT_HARDWARE, Blame.TRANSIENT_HARDWARE])


@pytest.mark.parametrize(
    ("flips", "blame"),
    [
        ({2: 1}, Blame.TRANSIENT_HARDWARE),  # rank 2's first run only
        ({2: 99}, Blame.PERSISTENT_HARDWARE),
        ({}, Blame.DATA),
    ],
)
def test_a_flipped_bit_is_attributed_by_real_replays(flips: dict[int, int], blame: Blame) -> None:
    """Four ranks as threads; a rank with flips left corrupts one word of its gradient."""

    def body(group: ThreadGroup) -> Blame:
        left = flips.get(group.rank, 0)

        def compute() -> str:
            nonlocal left
            weight = torch.ones(7, requires_grad=True)
            (weight * torch.arange(7.0)).sum().backward()
            assert weight.grad is not None
            if left > 0:
                left -= 1
                weight.grad.view(torch.int32)[3] ^= 1 << 20
            return str(checksum(weight.grad))

        original = compute() if group.rank == 2 else ""
        found = replay(group, suspect=2, original=original, compute=compute, deterministic=True, other=lambda: True)
        return classify(found)

    assert run_ranks(4, body) == [blame] * 4


class Gives(nn.Module):
    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> object:
        return self.output if self.output is not None else {"y": x * self.weight, "n": 3}


def test_an_output_that_has_no_digest_costs_no_training_and_is_named_later() -> None:
    model = Gives(torch.eye(3).to_sparse())
    replayer = Replayer({"model": model}, contextlib.nullcontext)
    replayer.begin()
    model(torch.ones(2, 3))  # does not raise
    assert replayer.call is None
    with pytest.raises(RuntimeError):
        replayer.raise_problem()
    replayer.end()


def test_a_call_travels_to_a_peer_and_comes_out_the_same() -> None:
    model = Gives(None)
    replayer = Replayer({"model": model}, contextlib.nullcontext)
    replayer.begin()
    model(torch.randn(2, 3, generator=torch.Generator().manual_seed(1)))
    call = replayer.call
    assert call is not None
    document = packed(call)
    assert document is not None
    there = unpacked(json.loads(json.dumps(document)), replayer, torch.device("cpu"))
    assert replayer.again(there) == replayer.again(call) == replayer.digest != ""
    with torch.no_grad():
        model.weight[1] += 1e-3
    assert replayer.again(call) != replayer.digest
    assert not replayer.is_bad(call)
    with torch.no_grad():
        model.weight[1] = float("inf")
    assert replayer.is_bad(call)
    replayer.end()


@pytest.mark.parametrize("value", [object(), {1: 2}, torch.zeros(1 << 23)])
def test_what_cannot_travel_or_is_too_large_stays(value: object) -> None:
    call = Call(name="model", args=(value,), kwargs={}, streams={}, buffers={})
    assert packed(call) is None


@pytest.mark.parametrize("shape", [(0,), (), (3, 0), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_inputs_of_any_shape_travel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.ones(shape, dtype=dtype)
    call = Call(name="model", args=(value, (1, [2.5, None])), kwargs={"mask": value}, streams={}, buffers={})
    document = packed(call)
    assert document is not None
    replayer = Replayer({}, contextlib.nullcontext)
    there = unpacked(json.loads(json.dumps({**document, "streams": {"$dict": {}}})), replayer, torch.device("cpu"))
    assert torch.equal(there.args[0], value) and there.args[0].dtype == dtype
    assert there.args[1] == (1, [2.5, None])
    assert torch.equal(there.kwargs["mask"], value)
