"""Small tensors only: a second thread would cost more than it brings."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
