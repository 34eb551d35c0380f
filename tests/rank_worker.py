"""One rank of the pool: reads a task a line, makes the process group it asks for, answers a line."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints must not be taken for an answer
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the pool asks a rank that hangs where it is
    for line in sys.stdin:
        task = json.loads(line)
        answers.write(json.dumps(answer(task)) + "\n")
        answers.flush()


def answer(task: dict[str, Any]) -> dict[str, Any]:
    rank, world_size = task["rank"], task["world_size"]
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)})
    for name in ("SAMERUN_FAULTS", "SAMERUN_RUN"):
        os.environ.pop(name, None)
    os.environ.update(task["environ"])
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(
                    task["store"]["prefix"], dist.TCPStore("127.0.0.1", task["store"]["port"], is_master=False)
                ),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
        module, _, function = task["call"].partition(":")
        return {"result": getattr(importlib.import_module(module), function)(**task["arguments"])}
    except BaseException as error:  # noqa: BLE001  # whatever happened belongs to the test that asked
        return {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # gloo's threads live as long as their group's last reference, and spin once a peer has gone


if __name__ == "__main__":
    main()
