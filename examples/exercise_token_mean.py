"""One replica has one supervised token, the other three: which mean is the objective?

python examples/exercise_token_mean.py

The numbers are gradients of single tokens' losses. Averaging each replica's own mean gives the lone token three times
the weight of each of the others. The token mean weighs all four alike; under DDP, which averages over D replicas, it
is each replica's sum times D/N. The last line is samerun's own window over the same tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from samerun.step import Step

REPLICAS = ([8.0], [1.0, 2.0, 3.0])


class Scalar(nn.Module):
    """A loss of g·w has the gradient g."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return gradients * self.weight


def naive_mean() -> float:
    """The mean over replicas of each one's own mean."""
    return sum(sum(tokens) / len(tokens) for tokens in REPLICAS) / len(REPLICAS)


def token_mean() -> float:
    tokens = [token for replica in REPLICAS for token in replica]
    return sum(tokens) / len(tokens)


def token_mean_under_ddp() -> float:
    """Each replica sends back its sum times D/N; DDP takes the mean over replicas."""
    num_replicas, num_tokens = len(REPLICAS), sum(len(tokens) for tokens in REPLICAS)
    return sum(sum(tokens) * num_replicas / num_tokens for tokens in REPLICAS) / num_replicas


def by_window() -> float:
    model = Scalar()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    window = step.window([torch.tensor(tokens, dtype=torch.float64) for tokens in REPLICAS])
    for tokens in window:
        window.backward(model(tokens).sum(), len(tokens))
    window.step()
    return -float(model.weight.detach())


def main() -> None:
    print(f"mean of replica means      {naive_mean():.4f}   (the lone token counts three times)")
    print(f"token mean                 {token_mean():.4f}")
    print(f"sums times D/N, averaged   {token_mean_under_ddp():.4f}")
    print(f"samerun's window           {by_window():.4f}")


if __name__ == "__main__":
    main()
