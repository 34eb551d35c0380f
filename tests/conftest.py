"""Fixtures for every test: ranks that are started once."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from object_servers import azure, s3  # noqa: F401  # fixtures
from rank_pool import RankPool

# Tests share their machine, so nothing here is judged by its time. The same examples every time keep `make test` a
# statement about the code; `make soak` (--hypothesis-profile=search) looks for new ones.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
