"""A scalar Adam, saved as JSON after five steps and resumed; and what lost moments do instead.

python examples/exercise_adam_resume.py

Minimises (w − y)²/2 over a repeating sequence of targets, with a learning rate that depends on the step and a cursor
into the targets. Four resumes: with everything; without the moments; without moments and step; without the cursor.
Python's JSON gives every float back exactly, so the first is equal bit for bit. The others are other trajectories:
what the moments remembered is not in the weight, and an old step counter corrects a bias that fresh moments lack.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

TARGETS = (1.0, -2.0, 0.5, 3.0)
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
BEFORE, AFTER = 5, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """All that the next step depends on."""

    w: float = 0.0
    m: float = 0.0
    v: float = 0.0
    step: int = 0
    consumed: int = 0
    """How many targets were used: the data's cursor."""

    @property
    def lr(self) -> float:
        """Warm-up over four steps, then 1/√step."""
        number = self.step + 1
        return 0.1 * min(number / 4, math.sqrt(4 / number))

    def after_one(self) -> Adam:
        """Kingma and Ba, algorithm 1 (arXiv 1412.6980)."""
        gradient = self.w - TARGETS[self.consumed % len(TARGETS)]
        step = self.step + 1
        m = BETA1 * self.m + (1 - BETA1) * gradient
        v = BETA2 * self.v + (1 - BETA2) * gradient**2
        unbiased_m, unbiased_v = m / (1 - BETA1**step), v / (1 - BETA2**step)
        w = self.w - self.lr * unbiased_m / (math.sqrt(unbiased_v) + EPSILON)
        return Adam(w=w, m=m, v=v, step=step, consumed=self.consumed + 1)

    def after(self, num_steps: int) -> Adam:
        state = self
        for _ in range(num_steps):
            state = state.after_one()
        return state

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Adam:
        return cls(**json.loads(text))


def resumes() -> dict[str, Adam]:
    """What each resume, and the run that never stopped, ends with."""
    saved = Adam().after(BEFORE).to_json()
    loaded = Adam.from_json(saved)
    return {
        "never stopped": Adam().after(BEFORE + AFTER),
        "everything": loaded.after(AFTER),
        "moments lost": replace(loaded, m=0.0, v=0.0).after(AFTER),
        "moments, step lost": replace(loaded, m=0.0, v=0.0, step=0).after(AFTER),
        "cursor lost": replace(loaded, consumed=0).after(AFTER),
    }


def main() -> None:
    found = resumes()
    twin = found["never stopped"]
    print("resume                             w   next rate  next target")
    for name, state in found.items():
        target = TARGETS[state.consumed % len(TARGETS)]
        verdict = "the same, bit for bit" if state == twin else f"off by {abs(state.w - twin.w):.3f}"
        print(f"{name:18s}  {state.w:.15f}  {state.lr:.7f}  {target:11g}  {verdict}")


if __name__ == "__main__":
    main()
