"""A training script in plain Python, as quick as a process can be: JSON state, a step log, and faults on request."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--save-every", type=int, default=3)
parser.add_argument("--seconds", type=float, default=0.05, help="what a step costs")
parser.add_argument("--forget", action="append", default=[], help="rng, position, weights, step")
parser.add_argument("--fault", default="")
options = parser.parse_args()
fault = options.fault

if fault == "terminal":
    Path("/dev/tty").read_text()
if fault == "ignores-term":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if fault == "daemon":
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
if fault == "outside":
    Path("stray.json").write_text("{}")


def readable(file: Path) -> bool:
    """Whether a careful trainer would go on from it."""
    try:
        return file.exists() and {"step", "rng"} <= set(json.loads(file.read_text()))
    except ValueError:
        return False


state_file, log_file = options.out / "state.json", options.out / "steps.jsonl"
generator = random.Random(None if fault == "unseeded" else 7)
state = {"step": 0, "position": 0, "weights": [0.0, 0.5], "lr": 0.1}
if fault == "careful" and not readable(state_file):
    state_file = options.out / "before.json"
if state_file.exists() and (fault != "careful" or readable(state_file)):
    if fault in ("crashes", "hangs"):
        sys.exit("cannot resume") if fault == "crashes" else signal.pause()
    saved = json.loads(state_file.read_text())
    state.update({key: value for key, value in saved.items() if key in state and key not in options.forget})
    if "rng" not in options.forget:
        version, words, gauss = saved["rng"]
        generator.setstate((version, tuple(words), gauss))


def save() -> None:
    version, words, gauss = generator.getstate()
    temporary, newest = options.out / "state.tmp", options.out / "state.json"
    temporary.write_text(json.dumps({**state, "rng": [version, list(words), gauss]}))
    if fault == "careful" and readable(newest):
        newest.rename(options.out / "before.json")
    temporary.rename(newest)


if fault == "saves-on-term":
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
stop: list[int] = []

while state["step"] < options.steps:
    state["lr"] = 0.1 * (1 - state["step"] / options.steps)
    state["position"] = (state["position"] * 5 + 3) % 17
    gradient = generator.gauss(0.0, 1.0) + 0.1 * state["position"]
    state["weights"] = [weight - state["lr"] * (gradient + 0.01 * weight) for weight in state["weights"]]
    state["step"] += 1
    with log_file.open("a") as log:
        row = {"step": state["step"], "loss": gradient, "lr": state["lr"], "sample": state["position"]}
        log.write(json.dumps({**row, "seconds": time.time()}) + "\n")
    if state["step"] % options.save_every == 0 and fault != "never-saves":
        save()
    print("step", state["step"], flush=True)
    if fault == "chatty":
        os.write(1, b"x" * (1 << 20))
    if stop:
        save()
        sys.exit(0)
    time.sleep(options.seconds)
if fault != "never-saves":
    save()
(options.out / "before.json").unlink(missing_ok=True)
(options.out / "final.json").write_text(json.dumps(state))
