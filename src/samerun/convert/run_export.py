"""`samerun.export`: the weights of a run for use elsewhere. Beside resume and warm start, the third operation."""

from __future__ import annotations

from pathlib import Path

from samerun.checkpoint.catalog import read_catalog
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.lookup import find, open_run
from samerun.convert.exporting import Exported, Form
from samerun.convert.exporting import export as write
from samerun.core.units import parse_size


def export(
    run: str | Path,
    destination: str | Path,
    *,
    checkpoint: str = "newest",
    to: str | Form = Form.HF,
    max_shard: str = "5GB",
) -> Exported:
    """Writes weights and buffers of one checkpoint of `run` to `destination`, for use. No run resumes from them.

    `run`: what `Run(...)` was given, or one checkpoint's directory. `checkpoint`: `newest`, a tag, or (the beginning
    of) a name. `to`: "hf" makes a new directory of safetensors files of at most `max_shard` each with an index,
    "safetensors" one new file, "torch" one new file of torch.save. Every byte is verified on the way; memory: one
    tensor at a time, all of them for "torch". Not collective: call it on one rank.

    Raises UsageError when there is no such run, checkpoint or form, AlreadyExistsError when there is something at
    `destination`, DamagedError for a byte that is wrong. It takes the checkpoint asked for or none: there is no
    fall-back to an older one, which would be other weights.
    """
    form = Form.parse(to, option="to")
    storage = open_run(run)
    entry = find(storage, read_catalog(storage), checkpoint)
    with Checkpoint(storage, entry, rank=0, size=0) as opened:
        return write(opened, destination, form, max_shard_bytes=parse_size(max_shard).num_bytes)
