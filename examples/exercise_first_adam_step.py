"""The first Adam step is at most the learning rate, whatever the gradient.

python examples/exercise_first_adam_step.py

With moments at zero, bias correction makes m̂ = g and v̂ = g², so the first step is η·g/(|g| + ε): its size says nothing
about the gradient's. That is why an optimizer restarted from zero moments moves every parameter by about η at once.
"""

from __future__ import annotations

import torch

LEARNING_RATE, EPSILON = 1e-3, 1e-8
GRADIENTS = (1e-6, 0.5, 2000.0)


def first_step(gradient: float) -> float:
    """How far torch's Adam moves a weight at its first step with this gradient."""
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    weight.grad = torch.tensor(gradient, dtype=torch.float64)
    torch.optim.Adam([weight], lr=LEARNING_RATE, eps=EPSILON).step()
    return -float(weight.detach())


def by_formula(gradient: float) -> float:
    return LEARNING_RATE * gradient / (abs(gradient) + EPSILON)


def main() -> None:
    print(f"learning rate {LEARNING_RATE:g}")
    for gradient in GRADIENTS:
        step = first_step(gradient)
        print(f"gradient {gradient:8g}: first step {step:.9f} = {step / LEARNING_RATE:.6f} learning rates")


if __name__ == "__main__":
    main()
