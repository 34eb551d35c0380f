"""From the names that people give files and keys to the one list of components; and names of wall-clock values."""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = (
    ("rng", ("rng", "random", "generator", "numpy_state", "cuda_state")),
    ("scaler", ("scaler", "loss_scale")),
    ("scheduler", ("scheduler", "sched", "lr", "learning_rate", "last_epoch")),
    ("ema", ("ema", "averaged")),
    ("buffers", ("running_mean", "running_var", "num_batches_tracked")),
    ("moments", ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "max_exp_avg_sq", "moments")),
    ("steps", ("optimizer_step",)),
    ("samples", ("samples", "sample", "sample_id", "sample_ids", "ids", "indices", "batch_ids")),
    ("cursor", ("cursor", "sampler", "dataloader", "position", "batch_idx")),
    ("loss", ("loss", "grad_norm", "best_metric", "eval_loss", "train_loss", "accuracy")),
    ("progress", ("step", "steps", "global_step", "update", "updates", "iteration", "epoch", "windows")),
    ("moments", ("optimizer", "optim", "opt")),
)  # fmt: skip
"""In this order: `optimizer.pt/state/0/exp_avg` is of the moments, `scheduler.pt/last_epoch` of the scheduler."""
_OPTIMIZER: Final = frozenset({"optimizer", "optim", "opt"})
_MODULE_LIKE: Final = frozenset({"ema", "moments", "buffers"})
_ONLY_KEYS: Final = frozenset({"samples", "cursor", "loss", "progress", "steps"})
_FILE: Final = re.compile(r"^(.*/)?[^/]*\.(pt|pth|bin|ckpt|tar|safetensors|jsonl?|csv)(/|$)")
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z_]*")
_WALL_CLOCK: Final = re.compile(
    r"(^|[^a-z])(time|times|timestamp|date|seconds|secs|elapsed|duration|runtime|tok_s|throughput|hostname|pid)($|[^a-z])"
    r"|_runtime|_per_second|_seconds|_time$|wall"
)


def component_of(path: str) -> str:
    """The component that `file/key/key` most likely is; `weights` where no word says anything else.

    `progress` stands for counters of updates and epochs, which belong to `steps` or `cursor`, one cannot tell which.
    """
    if ".distcp" in path:
        return "state"  # what each tensor is stands in a file that only unpickling can read
    key = _FILE.sub("", path)
    of_key, of_all = _words(key), _words(path)
    if of_all & _OPTIMIZER and of_key & {"step", "steps"}:
        return "steps"
    is_of_a_module = key.rpartition("/")[2].rpartition(".")[2] in ("weight", "bias")
    for name, known in _WORDS:
        if is_of_a_module and name not in _MODULE_LIKE:
            continue  # an embedding called `position` is no cursor
        words = of_key if name in _ONLY_KEYS else of_all  # `step-000300.pt` is no counter
        if words.intersection(known) or (name == "rng" and any(word.startswith("rng_") for word in words)):
            return name
    return "weights"


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def is_wall_clock(path: str) -> bool:
    """Whether the last key names a time, a rate or a host: never the same twice, and no part of a run."""
    return _WALL_CLOCK.search(path.rpartition("/")[2].lower()) is not None
