"""A real Slurm of one node on this machine, started and ended by the tests: munge, controller and node daemon.

Needs root and Debian's slurm-wlm and munge (`make services` installs them). Everything lives in one temporary folder
and listens on free ports of the loopback address; a Slurm installed for other purposes is not touched.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")

CONFIG = """
ClusterName=samerun
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillWait=10
OverTimeLimit=0
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_setup_env_fail
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=spot Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "starting slurmd needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (make services)" if missing else None


class SlurmCluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        controller_port, node_port = free_ports(2)
        config = CONFIG.format(
            host=host,
            folder=self.folder,
            controller_port=controller_port,
            node_port=node_port,
            cpus=os.cpu_count(),
        )
        (self.folder / "slurm.conf").write_text(config)
        self._daemon(
            "munged", "--foreground", "--force", "--num-threads=1", f"--socket={self.folder}/munge.socket",
            f"--key-file={key}", f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged has no socket")
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D", "-N", host)
        self._until(lambda: "idle" in self.ask("sinfo", "--noheader", "-o", "%T"), "the node does not become idle")

    def stop(self) -> None:
        self.ask("scancel", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def submit(self, script: Path, *options: str, environ: Mapping[str, str], arguments: Sequence[str] = ()) -> str:
        """The job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script), *arguments],
            env={**self._environ, **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False).stdout

    def state(self, job: str) -> str:
        """JobState and exit code, as `scontrol show job` says them."""
        words = dict(
            word.split("=", 1) for word in self.ask("scontrol", "show", "job", job).split() if word.count("=") == 1
        )
        return f"{words.get('JobState', 'UNKNOWN')} {words.get('ExitCode', '')} restarts={words.get('Restarts', '')}"

    def wait_for(self, job: str, state: str, *, seconds: float) -> str:
        self._until(lambda: self.state(job).startswith(state), f"job {job} never became {state}", seconds=seconds)
        return self.state(job)

    def _daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("wb")
        with log:
            self._daemons.append(subprocess.Popen(command, env=self._environ, stdout=log, stderr=log))

    def _until(self, condition: object, problem: str, *, seconds: float = 40) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{problem} in {seconds} s; logs in {self.folder}\n{self._tails()}"
            time.sleep(0.2)

    def _tails(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
