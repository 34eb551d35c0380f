"""Replicas that differ: one uses a parameter that another does not, or has a microbatch fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rank_pool import RankError, RankPool
from samerun.errors import UsageError
from samerun.step.parallel.filler import ForwardRecorder
from step_jobs import big_batch
from step_replica_jobs import complex_parameters, uneven

_ORDERS = [["a", "b"], ["b", "a"], ["b", "a"]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("world", [2, 3])
def test_parameters_used_in_another_order_on_each_rank(ranks: RankPool, dtype: str, world: int) -> None:
    """Sums of 16-bit gradients are exchanged side by side, and the order in which they came is each rank's own."""
    for seen in ranks.run(world, "step_replica_jobs:experts", order=_ORDERS, dtype=dtype):
        assert seen == {"a": pytest.approx(0.5), "b": pytest.approx(8.0), "c": None}


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_parameter_that_one_rank_did_not_use(ranks: RankPool, optimizers: int) -> None:
    for dtype in ("bfloat16", "float32"):
        for seen in ranks.run(
            2, "step_replica_jobs:experts", order=[["a", "a"], ["b", "b"]], dtype=dtype, optimizers=optimizers
        ):
            assert seen == {"a": 0.5, "b": 8.0, "c": None}, dtype  # (1 + 1) / 4 and (16 + 16) / 4


@pytest.mark.parametrize("accumulate", ["sharded", "unsharded"])
@pytest.mark.parametrize("kind", ["plain", "teacher", "unused output", "twice", "blocks", "parts"])
def test_a_rank_with_a_microbatch_fewer_does_what_its_peers_do(ranks: RankPool, kind: str, accumulate: str) -> None:
    """Whatever a batch does with the models, nobody waits for ever and the update is that of one process."""
    expected = uneven(kind, [3, 2, 4])
    for answer in ranks.run(2, "step_replica_jobs:uneven", kind=kind, counts=[3, 2, 4], accumulate=accumulate):
        assert answer["losses"] == pytest.approx(expected["losses"], abs=1e-12)
        assert answer["parameters"] == pytest.approx(expected["parameters"], abs=1e-12)


def test_forwards_that_nobody_can_repeat_are_an_error_and_no_hang() -> None:
    model = nn.Linear(2, 1)
    recorder = ForwardRecorder({"model": model})
    recorder.start()
    model.forward(torch.ones(1, 2))  # not a call: no hook sees it
    recorder.stop()
    with pytest.raises(UsageError, match="the last batch called no model"):
        recorder.replay()


def test_several_optimizers_under_fsdp2_need_even_replicas(ranks: RankPool) -> None:
    assert ranks.run(2, "step_replica_jobs:uneven_with_two_optimizers", counts=[1, 1, 1, 1]) == [None, None]
    for answer in ranks.answers(2, "step_replica_jobs:uneven_with_two_optimizers", counts=[1, 1, 1]):
        assert answer["error"] == "UsageError" and "as many microbatches as its peers" in answer["text"]


def test_a_head_that_nobody_averages_is_refused(ranks: RankPool) -> None:
    """fully_shard on some blocks leaves the rest to each rank alone: the copies would diverge in silence."""
    with pytest.raises(RankError, match="nobody averages their gradients"):
        ranks.run(2, "step_replica_jobs:sharded_in_part", with_mesh=False)
    assert ranks.run(2, "step_replica_jobs:sharded_in_part", with_mesh=True) == ["made", "made"]


def test_a_gradient_that_is_bad_on_one_rank_alone_makes_all_skip(ranks: RankPool) -> None:
    assert ranks.run(2, "step_replica_jobs:bad_gradient_of_one_rank_alone") == [{"reason": "non_finite_grad"}] * 2


def test_ddp_over_a_tensor_parallel_model_is_refused(ranks: RankPool) -> None:
    """Its plain parameters are shards in disguise; each rank would clip by a norm of its own."""
    with pytest.raises(RankError, match=r"hides that .* is a shard"):
        ranks.run(4, "step_replica_jobs:ddp_over_tensor_parallel")


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_model_compiled_after_it_was_wrapped(ranks: RankPool, wrap: str) -> None:
    expected, _, _ = big_batch((3, 2, 4))
    for answer in ranks.run(2, "step_replica_jobs:compiled", wrap=wrap, counts=[3, 2, 4]):
        assert torch.allclose(torch.tensor(answer["parameters"], dtype=torch.float64), expected, rtol=0, atol=1e-12)


def test_looking_at_a_bad_loss_runs_nothing_collective_where_ddp_is_compiled(ranks: RankPool, tmp_path: Path) -> None:
    """One rank alone repeats its forward; through DDP it would wait for its peers' buffers for ever."""
    answers = ranks.run(2, "step_replica_jobs:bad_loss_of_a_compiled_run", path=str(tmp_path), timeout_seconds=60)
    assert answers == [["non_finite_loss", "updated"]] * 2


def test_statistics_are_shared_once_a_window_with_several_optimizers_too(ranks: RankPool) -> None:
    """DDP gives everybody rank 0's buffers before a forward; that gradients are exchanged elsewhere changes nothing."""
    first, second = ranks.run(2, "step_replica_jobs:statistics_of_two_optimizers", num_windows=3)
    assert first["before"] == second["before"]
    assert len({tuple(mean) for mean in first["before"]}) == 3


def test_complex_parameters_beside_real_ones(ranks: RankPool) -> None:
    expected = complex_parameters([3, 2, 4])
    for answer in ranks.run(2, "step_replica_jobs:complex_parameters", counts=[3, 2, 4]):
        assert answer["norms"] == pytest.approx(expected["norms"], abs=1e-12)
        assert answer["parameters"] == pytest.approx(expected["parameters"], abs=1e-12)
