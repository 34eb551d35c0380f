import itertools

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from samerun.data import Data, Replica, WindowSampler, as_source
from samerun.errors import UsageError


def rows(loader: DataLoader, num_batches: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, num_batches)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_alone_it_gives_the_same_order_as_data(num_workers: int) -> None:
    sampler = WindowSampler(13, global_batch=7, micro_batch=3, seed=7)
    loader = DataLoader(range(13), batch_sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]
    with Data(range(13), global_batch=7, micro_batch=3, seed=7) as data:
        expected = [b.value.tolist() for w in itertools.islice(data.windows(), 5) for b in w]
    assert sampler.microbatches_per_window == 3 and sampler.samples_per_epoch == 13
    assert rows(loader, 15) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_alone_it_resumes_at_what_was_committed(num_workers: int) -> None:
    def fresh() -> tuple[WindowSampler, DataLoader]:
        sampler = WindowSampler(range(13), global_batch=7, micro_batch=3, seed=7)
        sampler.attach(Replica(index=1, count=2))
        return sampler, DataLoader(range(13), batch_sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]

    twin = rows(fresh()[1], 6)
    sampler, loader = fresh()
    assert sampler.microbatches_per_window == 1
    first = rows(loader, 2)
    for _ in first:
        sampler.commit()
    assert sampler.positions.committed == 14 <= sampler.positions.produced
    state = sampler.state_dict()
    again, loader = fresh()
    again.load_state_dict(state)
    assert first + rows(loader, 4) == twin
    with pytest.raises(UsageError, match="already iterated"):
        again.load_state_dict(state)
    assert again.identity() == sampler.identity()


def test_iterating_again_starts_at_what_was_committed() -> None:
    sampler = WindowSampler(13, global_batch=4, micro_batch=2)
    first = list(itertools.islice(sampler, 2))
    assert list(itertools.islice(sampler, 2)) == first
    sampler.commit()
    assert list(itertools.islice(sampler, 2)) != first


def test_a_loader_with_a_window_sampler_becomes_a_source() -> None:
    """Rebuilt from the user's attributes: its draws are keyed and the global generator is not touched."""

    def collate(items: list[int]) -> list[float]:
        return [i + torch.rand((), dtype=torch.float64).item() for i in items]

    sampler = WindowSampler(13, global_batch=6, micro_batch=2, seed=7)
    loader = DataLoader(range(13), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    source = as_source(loader)
    assert isinstance(source, Data)
    seen = [b.value for w in itertools.islice(source.windows(), 3) for b in w]
    assert torch.equal(torch.get_rng_state(), before)
    with Data(range(13), global_batch=6, micro_batch=2, seed=7, collate_fn=collate) as data:
        assert seen == [b.value for w in itertools.islice(data.windows(), 3) for b in w]
    source.close()


def test_loaders_that_cannot_be_continued_are_refused() -> None:
    for loader in (DataLoader(range(5)), DataLoader(range(5), sampler=RandomSampler(range(5)))):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="WindowSampler"):
            as_source(loader)
    sampler = WindowSampler(5, global_batch=2, micro_batch=1)
    used = DataLoader(range(5), batch_sampler=sampler)  # type: ignore[arg-type]
    next(iter(used))
    with pytest.raises(UsageError, match="already iterated"):
        as_source(used)
    with pytest.raises(UsageError, match=r"orders 5 samples.*has 6"):
        as_source(DataLoader(range(6), batch_sampler=WindowSampler(5, global_batch=2, micro_batch=1)))  # type: ignore[arg-type]
