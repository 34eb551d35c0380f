"""`dcp.save` and `dcp.load` through the plug-in, on a real object store by its URL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from object_servers import ObjectServer
from samerun.dcp import Reader, Writer
from samerun.errors import AlreadyExistsError


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # one process without a process group is what this is
@pytest.mark.parametrize("name", ["s3", "azure"])
def test_a_checkpoint_at_a_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    server: ObjectServer = request.getfixturevalue(name)
    for variable, value in server.environ.items():
        monkeypatch.setenv(variable, value)
    url = server.url()
    state = {"a": torch.arange(13.0), "step": 7}
    dcp.save(state, storage_writer=Writer(url))
    loaded = {"a": torch.zeros(13), "step": 0}
    dcp.load(loaded, storage_reader=Reader(url))
    assert torch.equal(loaded["a"], state["a"])
    assert loaded["step"] == 7
    with pytest.raises((AlreadyExistsError, dcp.CheckpointException), match="never written over"):
        dcp.save(state, storage_writer=Writer(url))
