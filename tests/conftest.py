"""Fixtures for every test: ranks that are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from object_servers import azure, s3  # noqa: F401  # fixtures
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
