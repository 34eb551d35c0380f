"""Clipping: torch's on the full unscaled gradient, whatever the scale, the shards and the number of ranks."""

from __future__ import annotations

import pytest
import torch

from rank_pool import RankPool
from samerun.step import Step
from step_jobs import batches, flat, loss_sum, net, one_window

COUNTS = (7, 1, 3, 5)
MAX_NORM = 0.3


def reference(max_norm: float) -> tuple[torch.Tensor, float]:
    """(parameters after a clipped SGD step on the token mean, norm before clipping), by torch alone."""
    model = net()
    (sum(loss_sum(model, batch) for batch in batches(COUNTS)) / sum(COUNTS)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return torch.tensor(flat(model), dtype=torch.float64), float(norm)


@pytest.mark.parametrize("max_norm", [MAX_NORM, 1.0, 1e6])
def test_one_process_equals_torch(max_norm: float) -> None:
    expected, norm = reference(max_norm)
    got = one_window("solo", COUNTS, max_norm=max_norm)
    assert torch.allclose(torch.tensor(got["parameters"], dtype=torch.float64), expected, rtol=0, atol=1e-12)
    assert got["norm"] == pytest.approx(norm, rel=1e-12)
    assert got["clipped"] == pytest.approx(min(norm, max_norm), rel=1e-5)  # torch's 1e-6 beside the norm


@pytest.mark.parametrize(("world_size", "wrap"), [(2, "ddp"), (2, "fsdp"), (3, "fsdp"), (4, "tp")])
def test_ranks_equal_torch(ranks: RankPool, world_size: int, wrap: str) -> None:
    expected, norm = reference(MAX_NORM)
    for got in ranks.run(world_size, "step_jobs:one_window", wrap=wrap, counts=COUNTS, max_norm=MAX_NORM):
        assert torch.allclose(torch.tensor(got["parameters"], dtype=torch.float64), expected, rtol=0, atol=1e-12)
        assert got["norm"] == pytest.approx(norm, rel=1e-12)


def test_plain_and_sharded_gradients_make_one_norm(ranks: RankPool) -> None:
    model = net()
    batch = batches([9])[0]
    (loss_sum(model, batch) / 9).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    expected = torch.tensor(flat(model), dtype=torch.float64)
    for got in ranks.run(3, "step_jobs:mixed_norm"):
        assert got["norm"] == pytest.approx(float(norm), rel=1e-12)
        assert torch.allclose(torch.tensor(got["parameters"], dtype=torch.float64), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("log2_scale", [0, 7, 12])
def test_norm_and_update_do_not_depend_on_the_loss_scale(log2_scale: int) -> None:
    """Clipping before unscaling would have no effect at 2^0 and a huge one at 2^12."""
    results = []
    for scale in (1.0, 2.0**log2_scale):
        model = net(dtype=torch.float32)
        step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp16", max_norm=MAX_NORM)
        state = step.state_dict()
        step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": scale}})
        window = step.window(batches([7, 5], torch.float32))
        for batch in window:
            window.backward(loss_sum(model, batch), len(batch[1]))
        outcome = window.step()
        assert outcome.updated and outcome.scale == scale
        results.append((outcome.grad_norm, outcome.grad_norm_clipped, torch.tensor(flat(model))))
    # fp16 gradients round at each scale alike except among subnormals, hence not bitwise
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    assert results[0][1] == pytest.approx(MAX_NORM, rel=1e-4)
    assert torch.allclose(results[0][2], results[1][2], atol=1e-4)


def test_a_scaled_clipped_update_equals_the_fp32_one() -> None:
    updates = {}
    for precision in ("fp32", "fp16"):
        model = net(dtype=torch.float32)
        start = torch.tensor(flat(model))
        step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0), precision=precision, max_norm=0.3)
        state = step.state_dict()
        if precision == "fp16":
            step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 2.0**10}})
        window = step.window(batches([7, 5], torch.float32))
        for batch in window:
            window.backward(loss_sum(model, batch), len(batch[1]))
        assert window.step().updated
        updates[precision] = torch.tensor(flat(model)) - start
    assert torch.allclose(updates["fp16"], updates["fp32"], atol=2e-3)  # eps of fp16 is 1e-3
    assert float(updates["fp16"].norm()) == pytest.approx(0.3, rel=1e-3)


def test_no_clipping_by_default() -> None:
    got = one_window("solo", COUNTS)
    assert got["norm"] == got["clipped"] > 0
