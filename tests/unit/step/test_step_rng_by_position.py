"""Draws of a forward by the position of its microbatch: the same masks on any number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_pool import RankPool
from samerun.errors import Refused, UsageError
from step_rng_model import losses


def test_masks_belong_to_the_microbatch_not_to_the_rank(ranks: RankPool, tmp_path: Path) -> None:
    """Bitwise: what microbatch k computes does not depend on who runs it. Streams of ranks are the control."""
    alone = losses(str(tmp_path / "1"), 2)
    assert len(alone) == 12 and len(set(alone.values())) == 12
    for world_size in (2, 3):
        answers = ranks.run(world_size, "step_rng_model:losses", path=str(tmp_path / f"{world_size}"), until=2)
        assert {key: value for answer in answers for key, value in answer.items()} == alone
    streams = ranks.run(2, "step_rng_model:losses", path=str(tmp_path / "streams"), until=2, rng="streams")
    assert {key: value for answer in streams for key, value in answer.items()} != alone


def test_a_resume_on_other_ranks_draws_what_the_twin_draws(ranks: RankPool, tmp_path: Path) -> None:
    twin = losses(str(tmp_path / "twin"), 3)
    first = losses(str(tmp_path / "run"), 1)
    rest = ranks.run(2, "step_rng_model:losses", path=str(tmp_path / "run"), until=3)
    assert first | {key: value for answer in rest for key, value in answer.items()} == twin


def test_the_choice_is_part_of_the_run(tmp_path: Path) -> None:
    losses(str(tmp_path / "run"), 1)
    with pytest.raises(Refused, match=r"step\.rng: saved .by_position., now nothing"):
        losses(str(tmp_path / "run"), 2, rng="streams")
    with pytest.raises(UsageError, match="by_position"):
        losses(str(tmp_path / "other"), 1, rng="by rank")
