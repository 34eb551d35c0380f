import subprocess
import sys

import pytest

import samerun
from samerun.data import Data, DataSource, Guarantee, as_source
from samerun.errors import UsageError


def test_data_is_a_source_as_it_is() -> None:
    data = Data(range(5), global_batch=2, micro_batch=1)
    assert isinstance(data, DataSource) and as_source(data) is data
    assert samerun.Data is Data


def test_anything_else_is_refused_with_the_ways_on() -> None:
    for wrong in ([1, 2], iter([1]), None, "text"):
        with pytest.raises(UsageError, match=r"samerun\.Data\(.*samerun\.data\.Stream") as caught:
            as_source(wrong)
        assert isinstance(caught.value, ValueError)


def test_each_guarantee_says_what_it_means() -> None:
    assert {g.label for g in Guarantee} == {"exact", "snapshot", "replay", "best_effort"}
    assert all(str(g) == f"{g.label}: {g.meaning}" for g in Guarantee)


def test_the_data_folder_loads_without_torch() -> None:
    code = (
        "import sys, samerun.data as d; d.Data(range(10), global_batch=4, micro_batch=2).state_dict(); "
        "d.WindowSampler(10, global_batch=4, micro_batch=2);"
        "d.as_source(d.Data(range(9), global_batch=4, micro_batch=2));"
        "assert all(getattr(d, name) for name in d.__all__ if name != 'Stream');"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        samerun.data.Nothing  # noqa: B018
