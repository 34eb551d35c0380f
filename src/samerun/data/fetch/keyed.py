"""Fetching one microbatch with randomness that belongs to the sample, not to the process that happens to read it.

While `dataset[i]` runs, the global generators of Python, NumPy and torch (CPU) are seeded by (seed, epoch, sample id);
while the collate function runs, by (seed, position of the microbatch). Afterwards they are put back. So an augmentation
or a mask is the same with 0 and 4 workers, on 1 and 3 replicas, and after any resume. It ends at generators that the
dataset owns itself, and at device generators: those are not touched.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from samerun.data.coverage import coverage_of_pairs
from samerun.data.fetch.numpy_state import NumpyState
from samerun.data.fetch.python_state import PythonState
from samerun.data.windows import MicroBatchPlan


class Fetched(NamedTuple):
    """A microbatch on its way back. A named tuple, because the pinning thread rebuilds those field by field."""

    window: int
    number: int
    coverage_high: int
    coverage_low: int
    value: Any


class KeyedFetch:
    """The dataset that the DataLoader sees: its index is a whole microbatch, its item the collated result.

    A dataset with `sample_of(epoch, sample)` is asked that way; any other by `dataset[sample]`.
    """

    def __init__(self, dataset: Any, *, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._sample_of: Callable[[int, int], Any] | None = getattr(dataset, "sample_of", None)
        self._collate = collate
        self._collate_draws = collate is not default_collate
        self._seed = seed

    def __getitems__(self, plan: MicroBatchPlan) -> Fetched:
        return self.fetch([plan])[0]

    def fetch(self, plans: Sequence[MicroBatchPlan]) -> list[Fetched]:
        """In this order; what each draws depends on none of the others."""
        with GeneratorsPutBack():
            return [self._fetch(plan) for plan in plans]

    def _fetch(self, plan: MicroBatchPlan) -> Fetched:
        items = [self._sample(epoch, sample) for epoch, sample in plan.samples]
        if self._collate_draws:
            seed_generators("collate", self._seed, plan.position)
        value = self._collate(items)
        coverage = coverage_of_pairs(plan.samples)
        return Fetched(plan.window, plan.number, coverage >> 32, coverage & 0xFFFFFFFF, value)

    def _sample(self, epoch: int, sample: int) -> Any:
        seed_generators("sample", self._seed, epoch, sample)
        try:
            return self._dataset[sample] if self._sample_of is None else self._sample_of(epoch, sample)
        except Exception as error:
            error.add_note(f"samerun: while reading sample {sample} of epoch {epoch}")
            raise


def identity_collate(fetched: Fetched) -> Fetched:
    """The DataLoader's own collate step; the user's ran inside KeyedFetch, where its randomness is keyed."""
    return fetched


def seed_generators(purpose: str, *key: int) -> None:
    """Seeds Python's, NumPy's and torch's global CPU generators by BLAKE2b(purpose, key).

    NumPy's from 32 bits, ten times faster than from more: among a million samples about a hundred pairs share its
    stream, and each is still a function of its own key.
    """
    text = f"samerun.sample.v1|{purpose}|{'|'.join(map(str, key))}"
    digest = hashlib.blake2b(text.encode(), digest_size=20).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    # not torch.manual_seed: that would also reseed every device's generator, which the model uses
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little", signed=True))


class GeneratorsPutBack:
    """A `with` block after which the caller's global generators continue as if nothing had been drawn.

    In a worker process nothing else draws from them, so nothing is saved there.
    """

    __slots__ = ("_cpu", "_numpy", "_python")

    def __enter__(self) -> Self:
        self._python: PythonState | None = None
        if get_worker_info() is None:
            self._python, self._numpy = PythonState(), NumpyState()
            self._cpu = torch.default_generator.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._python.put_back()
            self._numpy.put_back()
            torch.default_generator.set_state(self._cpu)
