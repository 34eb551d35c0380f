"""The names that a training loop written by hand teaches, over the parts of samerun that do the work.

For learning, and for loops that keep their own shape: each function is one idea that `samerun.Run` has built in. What
they cannot give is the whole: agreement over ranks, a data cursor, a twin to compare with. Loaded on first use.

A checkpoint of these functions is a `ckpt.v1` checkpoint at a path of its own: `samerun ls`, `show`, `verify`,
`diff` and `export` work on it. Nothing here pickles; a `.pt` file of another program is read weights-only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samerun.core.lazy import lazy_names

if TYPE_CHECKING:
    from samerun.lessons.amp import (
        DEFAULT_MAX_NORM,
        AmpTrainState,
        StepLog,
        clip_global_l2_norm,
        has_non_finite_grad,
        rolling_skip_rate,
    )
    from samerun.lessons.checkpoints import (
        CHECKPOINT_SCHEMA,
        atomic_save,
        capture_rng_state,
        load_checkpoint,
        restore_rng_state,
        rotate_checkpoints,
        save_checkpoint,
    )
    from samerun.lessons.shards import load_sharded, save_sharded
    from samerun.lessons.windows import loss_scaled_for_accum, no_sync_context

__all__ = [  # noqa: RUF022  # sorted as every list of names here is: by code point
    "AmpTrainState", "CHECKPOINT_SCHEMA", "DEFAULT_MAX_NORM", "StepLog", "atomic_save", "capture_rng_state",
    "clip_global_l2_norm", "has_non_finite_grad", "load_checkpoint", "load_sharded", "loss_scaled_for_accum",
    "no_sync_context", "restore_rng_state", "rolling_skip_rate", "rotate_checkpoints", "save_checkpoint",
    "save_sharded",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AmpTrainState": "amp",
        "CHECKPOINT_SCHEMA": "checkpoints",
        "DEFAULT_MAX_NORM": "amp",
        "StepLog": "amp",
        "atomic_save": "checkpoints",
        "capture_rng_state": "checkpoints",
        "clip_global_l2_norm": "amp",
        "has_non_finite_grad": "amp",
        "load_checkpoint": "checkpoints",
        "load_sharded": "shards",
        "loss_scaled_for_accum": "windows",
        "no_sync_context": "windows",
        "restore_rng_state": "checkpoints",
        "rolling_skip_rate": "amp",
        "rotate_checkpoints": "checkpoints",
        "save_checkpoint": "checkpoints",
        "save_sharded": "shards",
    },
)
