"""The only reader of environment variables: two are ours, the rest are the launcher's.

`SAMERUN_RUN` overrides a run's path. `SAMERUN_FAULTS` holds a fault plan for drills. Nothing else changes behaviour.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from samerun.errors import UsageError

RUN_VARIABLE = "SAMERUN_RUN"
FAULTS_VARIABLE = "SAMERUN_FAULTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What torchrun (or a scheduler) told this process. `rank is None` means: started by hand, alone."""

    rank: int | None
    world_size: int | None
    local_rank: int | None
    restart_count: int
    supervised: bool
    """Whether torchrun's agent started this process, so that its death leaves this process orphaned."""
    error_file: str | None
    """Where torchrun's agent looks for this process's last words."""


def run_path_override(environ: Mapping[str, str] | None = None) -> str | None:
    return (os.environ if environ is None else environ).get(RUN_VARIABLE) or None


def fault_plan_text(environ: Mapping[str, str] | None = None) -> str | None:
    return (os.environ if environ is None else environ).get(FAULTS_VARIABLE) or None


def schedulers(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Schedulers that end this process on their own clock, by the names that `samerun plan preempt --chain` knows."""
    env = os.environ if environ is None else environ
    marks = (("KUBERNETES_SERVICE_HOST", "kubernetes"), ("SLURM_JOB_ID", "slurm-limit"))
    return tuple(name for variable, name in marks if env.get(variable))


def launcher(environ: Mapping[str, str] | None = None) -> Launcher:
    env = os.environ if environ is None else environ
    return Launcher(
        rank=_integer(env, "RANK"),
        world_size=_integer(env, "WORLD_SIZE"),
        local_rank=_integer(env, "LOCAL_RANK"),
        restart_count=_integer(env, "TORCHELASTIC_RESTART_COUNT") or 0,
        supervised="TORCHELASTIC_RUN_ID" in env,
        error_file=env.get("TORCHELASTIC_ERROR_FILE") or None,
    )


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"environment variable {name}={text!r} is not a whole number") from None
