"""The nursery of the pool's ranks: imports torch once, then forks a rank for every socket that it is handed.

A rank reads a task a line, makes the process group it asks for, and answers a line.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import samerun.run.run
import samerun.step.loop  # noqa: F401  # imported here, once, for all ranks


def main() -> None:
    """Forks until the pool's end of the socket is closed."""
    pool = socket.socket(fileno=int(sys.argv[1]))
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank; its socket tells that it is gone
    while True:
        word, descriptors, _, _ = socket.recv_fds(pool, 1, 1)
        if not word:
            return
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        assert num_threads == 1, f"{num_threads} threads: what they hold would stay locked in a fork"
        pid = os.fork()
        if pid == 0:
            pool.close()
            serve(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])
        pool.sendall(pid.to_bytes(4, "big"))


def serve(tasks: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the pool asks a rank that hangs where it is
    np.random.seed()  # as in a process of its own: no two ranks draw alike by accident
    with tasks.makefile("r") as lines, tasks.makefile("w") as answers:
        for line in lines:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
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
